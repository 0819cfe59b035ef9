"""From a request to a job: everything a caller can get wrong is found here, before any work is done."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from kvblend.actors.core.conditioning import NEIGHBOURS, Conditioning, Ids
from kvblend.actors.core.events import Job
from kvblend.actors.core.planning import rope_ids, segment_keys, storing_layout
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import (
    LOGPROBS_MAX,
    MODES,
    PENALTY_MAX,
    REPETITION_PENALTIES,
    STOP_IDS_MAX,
    Document,
    Generate,
    Sampling,
)
from kvblend.actors.selection import blend_shape, budget_ratio, kl_bound, merge_selection
from kvblend.actors.settings import Settings, tenant_salt
from kvblend.engine.assembly import Engine
from kvblend.engine.conditioning import passages_of, warm_ids
from kvblend.engine.layout import PromptLayout
from kvblend.engine.plain_prompt import build_plain_prompt, split_text
from kvblend.engine.prompt import PromptDocument, PromptError, build_prompt, chunk_ids, system_ids
from kvblend.store.keys import ChunkKey

NEIGHBOURS_MAX = 8


def refuse(param: str, value: object, limit: str) -> RequestError:
    """An `invalid_request` that names the field, the value and the limit."""
    return RequestError("invalid_request", f"{param} is {value!r}; {limit}", param)


def check_request(request: Generate, settings: Settings, model: str) -> None:
    """Raise RequestError for anything that can be told without the tokenizer."""
    name = request.request_id
    if not 1 <= len(name) <= 256 or name.startswith("/"):
        raise refuse("request_id", name[:80], "it must have 1..256 characters and not begin with '/'")
    if request.model not in (None, model):
        raise RequestError("not_found", f"model {request.model!r} is not served here; served: {model!r}", "model")
    if len(request.documents) > settings.documents_max:
        raise refuse("documents", f"{len(request.documents)} documents", f"at most {settings.documents_max} are taken")
    if request.generate and not request.messages and request.prompt is None:
        raise refuse("input", "", "a question of at least one token is needed")
    if not request.generate and not request.documents:
        raise refuse("documents", [], "storing needs at least one document")
    if request.deadline_ms is not None and not (math.isfinite(request.deadline_ms) and request.deadline_ms > 0):
        raise refuse("deadline_ms", request.deadline_ms, "it must be a number above 0")
    blend, ratio = request.blend, request.blend.recompute_ratio
    if blend.mode not in MODES:
        raise refuse("blend.mode", blend.mode, f"choose {', '.join(MODES)}")
    if ratio not in (None, "auto") and not (isinstance(ratio, int | float) and 0.0 <= ratio <= 1.0):
        raise refuse("blend.recompute_ratio", ratio, "it must lie in 0..1, or be auto")
    merge_selection(settings, blend)
    kl_bound(settings, blend)
    if blend.on_miss not in (None, "fresh", "precompute"):
        raise refuse("blend.on_miss", blend.on_miss, "choose fresh, precompute")
    check_neighbours(request, settings)
    check_sampling(request.sampling, settings)


def check_neighbours(request: Generate, settings: Settings) -> None:
    """Raise RequestError for neighbours (`behind`) where there may be none, and for those that are no plain texts."""
    for index, document in enumerate(request.documents):
        field, count = f"documents[{index}].behind", len(document.behind)
        if not count:
            continue
        if request.generate:
            raise refuse(field, f"{count} texts", "neighbours are given when a document is stored (generate: false)")
        if settings.conditioning != "neighbours":
            limit = f"the server's conditioning must be 'neighbours' for that; it is {settings.conditioning!r}"
            raise refuse(field, f"{count} texts", limit)
        if count > NEIGHBOURS_MAX:
            raise refuse(field, f"{count} texts", f"at most {NEIGHBOURS_MAX} are taken")
        for number, near in enumerate(document.behind):
            if near.id is not None or near.behind:
                raise refuse(f"{field}[{number}]", near.id or "nested", "a neighbour is a text with an optional title")


def server_conditioning(settings: Settings, engine: Engine) -> Conditioning:
    """What a server with these settings computes chunks behind, in tokens of its model."""
    context, kind = engine.config.context_length, settings.conditioning
    wanted = kind in ("warm", "neighbours")
    warm = warm_ids(engine.tokenizer, context, passages_of(settings.warm_text)) if wanted else ()
    return Conditioning(kind, warm, min(context, settings.kv_tokens_max), settings.echo)


def check_sampling(sampling: Sampling, settings: Settings) -> None:
    """Raise RequestError for sampling settings outside their limits."""
    if not 1 <= sampling.max_tokens <= settings.max_tokens_max:
        raise refuse("max_output_tokens", sampling.max_tokens, f"it must lie in 1..{settings.max_tokens_max}")
    if not (math.isfinite(sampling.temperature) and 0.0 <= sampling.temperature <= 100.0):
        raise refuse("temperature", sampling.temperature, "it must lie in 0..100")
    if not 0.0 < sampling.top_p <= 1.0:
        raise refuse("top_p", sampling.top_p, "it must be above 0 and at most 1")
    if sampling.seed is not None and not -(1 << 63) <= sampling.seed < 1 << 64:
        raise refuse("seed", sampling.seed, "it must be a whole number of 64 bits")
    if any(not text for text in sampling.stop):
        raise refuse("stop", list(sampling.stop), "an empty stop string would end every answer at once")
    if sampling.top_k < 0:
        raise refuse("top_k", sampling.top_k, "it must be at least 1, or 0 for all tokens")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise refuse("min_p", sampling.min_p, "it must lie in 0..1")
    low, high = REPETITION_PENALTIES
    if not low <= sampling.repetition_penalty <= high:
        raise refuse("repetition_penalty", sampling.repetition_penalty, f"it must lie in {low:g}..{high:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -PENALTY_MAX <= getattr(sampling, name) <= PENALTY_MAX:
            raise refuse(name, getattr(sampling, name), f"it must lie in {-PENALTY_MAX:g}..{PENALTY_MAX:g}")
    if len(sampling.stop_token_ids) > STOP_IDS_MAX:
        raise refuse("stop_token_ids", f"{len(sampling.stop_token_ids)} ids", f"at most {STOP_IDS_MAX} are taken")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise refuse("min_tokens", sampling.min_tokens, f"it must lie in 0..{sampling.max_tokens}, the longest answer")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= LOGPROBS_MAX:
        raise refuse("top_logprobs", sampling.logprobs, f"it must lie in 0..{LOGPROBS_MAX}")


class JobBuilder:
    """Lays prompts out and names their segments. Pure but for a seed drawn where none is given; runs off the loop."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._conditioning = server_conditioning(settings, engine)

    def answer(self, request: Generate, stored: dict[int, tuple[int, ...]], note: str = "") -> Job:
        """The job of a question. `stored` has the token ids of documents given by id. Raises RequestError.

        `note` goes into the figures of the answer.
        """
        settings, engine = self._settings, self._engine
        merge_selection(settings, request.blend, engine.config.num_layers)
        self._check_stop_ids(request.sampling)
        layout, salt = self._lay_out(request, stored), tenant_salt(settings.salt, request.tenant)
        self._check_fits(layout, request.sampling.max_tokens)
        blend, sampling = replace(request.blend, max_kl=kl_bound(settings, request.blend)), request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(63))
        regime = rope_ids(engine.config.rope_regime(layout.num_tokens), layout.num_tokens)
        return Job(
            request.request_id,
            "generate",
            layout,
            segment_keys(layout, blend.mode, self._conditioning, engine.store_fingerprint, salt, regime),
            blend.mode,
            budget_ratio(settings, blend),
            blend,
            sampling,
            blend.on_miss or settings.on_miss,
            note=note,
            shape=blend_shape(settings, blend),
            deadline_ms=request.deadline_ms,
            client=request.tenant or request.client,
            salt=salt,
            regime=regime,
        )

    def _lay_out(self, request: Generate, stored: dict[int, tuple[int, ...]]) -> PromptLayout:
        """The prompt of a question; what the separator parts in it counts as documents too. Raises RequestError."""
        settings, engine = self._settings, self._engine
        documents = [PromptDocument(d.title, d.text, stored.get(index)) for index, d in enumerate(request.documents)]
        turns = [(message.role, message.content) for message in request.messages]
        try:
            if request.prompt is not None:
                layout = build_plain_prompt(engine.tokenizer, request.prompt, settings.separator, documents)
            else:
                if turns and turns[0][0] == "user":
                    *pieces, question = split_text(turns[0][1], settings.separator) or [""]
                    documents += [PromptDocument(text=piece) for piece in pieces]
                    turns[0] = ("user", question)
                system = settings.system if request.system is None else request.system
                layout = build_prompt(engine.tokenizer, engine.template, system, turns, documents)
        except PromptError as error:
            raise RequestError("invalid_request", str(error), error.param) from None
        count, limit = sum(1 for _ in layout.chunks()), settings.documents_max
        if count > limit:
            field = "messages" if request.prompt is None else "prompt"
            raise refuse(field, f"a text of {count} chunks", f"at most {limit} are taken")
        return layout

    def stores(self, request: Generate, stored: dict[int, tuple[int, ...]], ids: Sequence[str]) -> list[Job]:
        """One precompute job per document, with these job ids. Raises RequestError."""
        settings, engine = self._settings, self._engine
        system = settings.system if request.system is None else request.system
        head: Ids = ()
        jobs = []
        try:
            if settings.conditioning != "bare":
                head = system_ids(engine.tokenizer, engine.template, system)
            for index, document in enumerate(request.documents):
                known = stored.get(index)
                field = f"documents[{index}]"
                tokens = known or chunk_ids(engine.tokenizer, document.title, document.text, field)
                near = self._neighbours(document, tokens, field)
                jobs.append(self._store(ids[index], request, head, near, tokens, field))
        except PromptError as error:
            raise RequestError("invalid_request", str(error), error.param) from None
        return jobs

    def _neighbours(self, document: Document, tokens: Ids, field: str) -> list[Ids]:
        """The token ids of a document's neighbours. Raises RequestError where it is its own."""
        near = []
        for number, other in enumerate(document.behind):
            path = f"{field}.behind[{number}]"
            near.append(chunk_ids(self._engine.tokenizer, other.title, other.text, path))
            if near[-1] == tokens:
                raise refuse(path, other.text[:80], "a document cannot be its own neighbour")
        return near

    def _store(self, name: str, request: Generate, head: Ids, near: list[Ids], tokens: Ids, field: str) -> Job:
        """The job of one document: behind those of its neighbours that fit, else behind what the server is set to."""
        print_, rule = self._engine.store_fingerprint, self._conditioning
        salt = tenant_salt(self._settings.salt, request.tenant)
        label: str = rule.label(head, len(tokens))
        pieces, wanted, note = rule.parts(head, len(tokens)), len(near), ""
        while near and len(head) + sum(map(len, near)) + len(tokens) > rule.tokens_max:
            near = near[:-1]
        if near:
            label, pieces = "neighbours", tuple(piece for piece in (head, *near) if piece)
        behind = (*head, *NEIGHBOURS) if near else rule.behind(head, len(tokens))
        if len(near) < wanted:
            note = f"{field}: {len(near)} of {wanted} neighbours fit into {rule.tokens_max} tokens"
        elif rule.warms and label == "system":
            note = f"{field}: too long to be computed behind the warm text, so behind the system prompt alone"
        own = ChunkKey.of(print_, salt, behind, tokens)
        layout, keys = storing_layout(pieces, tokens, own, len(pieces) - len(near), replace=bool(near))
        self._check_fits(layout, 0, field)
        job = Job(name, "precompute", layout, keys, "blend", 0.0, request.blend, request.sampling)
        echo = not near and rule.echoes(head, len(tokens))
        client = request.tenant or request.client
        return replace(job, conditioning=label, replace=bool(near), echo=echo, note=note, client=client)

    def _check_stop_ids(self, sampling: Sampling) -> None:
        size = self._engine.config.vocab_size
        for index, token_id in enumerate(sampling.stop_token_ids):
            if not 0 <= token_id < size:
                raise refuse(f"stop_token_ids[{index}]", token_id, f"the model's token ids lie in 0..{size - 1}")

    def _check_fits(self, layout: PromptLayout, max_tokens: int, field: str = "input") -> None:
        context, slots = self._engine.config.context_length, self._settings.kv_tokens_max
        total = layout.num_tokens + max_tokens
        if layout.num_tokens > context or total > context:
            raise RequestError(
                "too_large" if layout.num_tokens > context else "invalid_request",
                f"{field}: the prompt has {layout.num_tokens} tokens and asks for {max_tokens} more; "
                f"the model's context holds {context}",
                field if layout.num_tokens > context else "max_output_tokens",
            )
        if total > slots:
            raise RequestError(
                "too_large", f"the request needs {total} KV slots; kv_tokens_max allows {slots} in all", field
            )
