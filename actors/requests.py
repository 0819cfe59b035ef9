"""From a request to a job: everything a caller can get wrong is found here, before any work is done."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from kvblend.actors.core.events import Job, SegmentKeys
from kvblend.actors.core.planning import segment_keys
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import MODES, Generate, Sampling
from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine
from kvblend.engine.layout import PromptLayout, SegmentKind
from kvblend.engine.prompt import PromptDocument, PromptError, build_prompt, chunk_ids, system_ids
from kvblend.store.keys import ChunkKey


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
    if request.generate and not request.messages:
        raise refuse("input", "", "a question of at least one token is needed")
    if not request.generate and not request.documents:
        raise refuse("documents", [], "storing needs at least one document")
    if request.deadline_ms is not None and not (math.isfinite(request.deadline_ms) and request.deadline_ms > 0):
        raise refuse("deadline_ms", request.deadline_ms, "it must be a number above 0")
    blend, ratio = request.blend, request.blend.recompute_ratio
    if blend.mode not in MODES:
        raise refuse("blend.mode", blend.mode, f"choose {', '.join(MODES)}")
    if ratio is not None and not 0.0 <= ratio <= 1.0:
        raise refuse("blend.recompute_ratio", ratio, "it must lie in 0..1")
    if blend.selector not in (None, "divergence", "query"):
        raise refuse("blend.selector", blend.selector, "choose divergence, query")
    if blend.residual not in (None, "none", "mean", "distance", "ridge"):
        raise refuse("blend.residual", blend.residual, "choose none, mean, distance, ridge")
    if blend.divergence not in (None, "k", "v", "kv"):
        raise refuse("blend.divergence", blend.divergence, "choose k, v, kv")
    if blend.on_miss not in (None, "fresh", "precompute"):
        raise refuse("blend.on_miss", blend.on_miss, "choose fresh, precompute")
    check_sampling(request.sampling, settings)


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


class JobBuilder:
    """Lays prompts out and names their segments. Pure but for a seed drawn where none is given; runs off the loop."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine

    def answer(self, request: Generate, stored: dict[int, tuple[int, ...]]) -> Job:
        """The job of a question. `stored` has the token ids of documents given by id. Raises RequestError."""
        settings, engine = self._settings, self._engine
        documents = [PromptDocument(d.title, d.text, stored.get(index)) for index, d in enumerate(request.documents)]
        turns = [(message.role, message.content) for message in request.messages]
        system = settings.system if request.system is None else request.system
        try:
            layout = build_prompt(engine.tokenizer, engine.template, system, turns, documents)
        except PromptError as error:
            raise RequestError("invalid_request", str(error), error.param) from None
        self._check_fits(layout, request.sampling.max_tokens)
        blend, sampling = request.blend, request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(63))
        ratio = settings.recompute_ratio if blend.recompute_ratio is None else blend.recompute_ratio
        return Job(
            request.request_id,
            "generate",
            layout,
            segment_keys(layout, blend.mode, settings.conditioning, engine.fingerprint, settings.salt),
            blend.mode,
            ratio,
            blend,
            sampling,
            blend.on_miss or settings.on_miss,
        )

    def stores(self, request: Generate, stored: dict[int, tuple[int, ...]], ids: Sequence[str]) -> list[Job]:
        """One precompute job per document, with these job ids. Raises RequestError."""
        settings, engine = self._settings, self._engine
        system = settings.system if request.system is None else request.system
        head: tuple[int, ...] = ()
        jobs = []
        try:
            if settings.conditioning == "system":
                head = system_ids(engine.tokenizer, engine.template, system)
            for index, document in enumerate(request.documents):
                known = stored.get(index)
                field = f"documents[{index}]"
                tokens = known or chunk_ids(engine.tokenizer, document.title, document.text, field)
                jobs.append(self._store(ids[index], request, head, tokens, field))
        except PromptError as error:
            raise RequestError("invalid_request", str(error), error.param) from None
        return jobs

    def _store(self, name: str, request: Generate, head: tuple[int, ...], tokens: tuple[int, ...], field: str) -> Job:
        print_, salt = self._engine.fingerprint, self._settings.salt
        parts = [(SegmentKind.CHUNK, tokens)]
        own = ChunkKey.of(print_, salt, head, tokens)
        keys = [SegmentKeys(((own, True),), keep=own)]
        if head:
            above = ChunkKey.of(print_, salt, (), head)
            parts.insert(0, (SegmentKind.SYSTEM, head))
            keys.insert(0, SegmentKeys(((above, True),), keep=above))
        layout = PromptLayout.of(parts)
        self._check_fits(layout, 0, field)
        return Job(name, "precompute", layout, tuple(keys), "blend", 0.0, request.blend, request.sampling)

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
