"""The KV of an evaluation's chunks, in memory: computed behind the text that a conditioning stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from kvblend.engine.capture import Capture
from kvblend.engine.contrast import contrast
from kvblend.engine.evaluation.forcing import ForcedSequence, Prefilled
from kvblend.engine.kv import KVPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.precision import Precision
from kvblend.engine.recommended import Conditioning
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.step import Step, WorkItem

Payloads = list[memoryview]
_ALL_ROWS = 1 << 30
RECENT_MAX = 16
FormKey = tuple[str, str, tuple[tuple[int, ...], ...], tuple[int, ...]]
"""What was computed, the stored form of what stands before it, the ids of these texts, and those of the chunk."""


class KeptForms(Protocol):
    """Where forms of chunks that were computed once are looked for before they are computed again."""

    def get(self, key: FormKey) -> Payloads | None:
        """One payload per layer, as computed; None where there is none."""

    def put(self, key: FormKey, payloads: Payloads) -> None:
        """Keep these for later."""


class RecentForms:
    """The last few plain forms, in memory: every conditioning of a question asks for them, for a contrast but one."""

    def __init__(self, count_max: int = RECENT_MAX) -> None:
        self._count_max = count_max
        self._forms: dict[FormKey, Payloads] = {}

    def get(self, key: FormKey) -> Payloads | None:
        """As of KeptForms."""
        return self._forms.get(key)

    def put(self, key: FormKey, payloads: Payloads) -> None:
        """As of KeptForms; the oldest ones go."""
        if key[0] == "plain":
            self._forms[key] = payloads
        while len(self._forms) > self._count_max:
            del self._forms[next(iter(self._forms))]


class PayloadSource:
    """A LayerSource over payloads that are all there: first position of a segment -> one payload per layer."""

    def __init__(self, payloads: Mapping[int, Payloads]) -> None:
        self._payloads = payloads

    def take(self, layer: int) -> Sequence[tuple[int, memoryview]]:
        """Every segment's payload of this layer."""
        return [(start, layers[layer]) for start, layers in self._payloads.items()]


class Prefiller:
    """Runs one prompt at a time on a model, outside any scheduler.

    `precision` is the form of the payloads it takes and hands out; None: the compute dtype.
    """

    def __init__(self, step: Step, pool: KVPool, precision: Precision | None = None) -> None:
        self.step = step
        self.pool = pool
        self.precision = precision or Precision.of_model(step.model)

    @torch.inference_mode()
    def run(
        self,
        plan: BlendPlan,
        selector: Selector,
        payloads: Mapping[int, Payloads] | None = None,
        captures: Sequence[int] = (),
        tokens_extra: int = 0,
    ) -> Prefilled:
        """Prefill a prompt to its first token's logits, keeping slots for `tokens_extra` more.

        `payloads` holds the KV of reused segments by their first position, `captures` the segments whose KV is kept.
        The caller gives the slab back with `release`.
        """
        model, layout = self.step.model, plan.layout
        config = model.config
        spans = [(layout.segments[index].start, layout.segments[index].end) for index in captures]
        capture = None
        if spans:
            capture = Capture(spans, config.num_layers, config.num_kv_heads, config.head_dim, model.dtype)
        slab = self.pool.reserve(layout.num_tokens + tokens_extra)
        try:
            source = PayloadSource(payloads or {})
            state = ForcedSequence.start("evaluation", plan, selector, slab, config.num_layers, source, capture)
            state.precision = self.precision
            outcome = self.step.run([WorkItem(state, _ALL_ROWS)])[0]
            while outcome.status == "running":
                outcome = self.step.run([WorkItem(state, _ALL_ROWS)])[0]
            if outcome.hidden is None:
                raise RuntimeError(f"the prefill ended as {outcome.status}")
            return Prefilled(self.step, state, model.logits(outcome.hidden[None])[0])
        except BaseException:
            self.pool.release(slab)
            raise

    def store(self, payloads: Payloads, tokens: int) -> Payloads:
        """The stored form of a captured segment of `tokens` tokens."""
        return [self.precision.encode(payload, tokens) for payload in payloads]

    def release(self, done: Prefilled) -> None:
        """Give a prompt's KV slots back."""
        self.pool.release(done.slab)


class ChunkKV:
    """Computes chunks' KV behind a conditioning. What stands before them is computed once and kept.

    `system` are the ids before the first document of every prompt (may be empty), `warm` those of the unrelated text,
    `corpus` those of such a text out of the corpus (where there is none, `warm` stands for it). Chunks that `kept` has
    are not computed again.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        system: Sequence[int],
        warm: Sequence[int],
        corpus: Sequence[int] = (),
        kept: KeptForms | None = None,
    ) -> None:
        self._prefiller = prefiller
        self._forms = RecentForms(0) if kept is None else kept
        self._texts: dict[Conditioning, list[Sequence[int]]] = {
            "bare": [],
            "system": [system] if system else [],
            "warm": [text for text in (system, warm) if text],
            "corpus": [text for text in (system, corpus or warm) if text],
        }
        self._kept: dict[tuple[int, ...], Payloads] = {}

    def compute(self, conditioning: Conditioning, ids: Sequence[int]) -> Payloads:
        """One payload per layer of the chunk `ids`, in its stored form.

        Behind an unrelated text it is that of two contexts, as served.
        """
        return self._prefiller.store(self._computed(conditioning, ids), len(ids))

    def _computed(self, conditioning: Conditioning, ids: Sequence[int]) -> Payloads:
        texts = self._texts[conditioning]
        if conditioning in ("bare", "system") or texts == self._texts["system"]:
            return self._kept_form("plain", texts, ids)
        return self._kept_form("contrast", texts, ids)

    def _kept_form(self, kind: str, texts: Sequence[Sequence[int]], ids: Sequence[int]) -> Payloads:
        key = (kind, self._prefiller.precision.name, tuple(map(tuple, texts)), tuple(ids))
        found = self._forms.get(key)
        if found is None:
            found = self._behind(texts, ids) if kind == "plain" else self._contrast(texts, ids)
            self._forms.put(key, found)
        return found

    def _contrast(self, texts: Sequence[Sequence[int]], ids: Sequence[int]) -> Payloads:
        """The form of two contexts, `texts` and the system prompt, with the echo where it fits."""
        model = self._prefiller.step.model
        config = model.config
        warm, plain = self._behind(texts, ids), self._kept_form("plain", self._texts["system"], ids)
        echo = None
        if sum(map(len, texts)) + 2 * len(ids) <= config.context_length:
            copy = {len(texts): self._prefiller.store(warm, len(ids))}
            echo = self._behind([*texts, ids], ids, copy)
        return contrast(warm, plain, config.num_kv_heads, config.head_dim, model.dtype, echo=echo)

    def store(self, payloads: Payloads, tokens: int) -> Payloads:
        """The stored form of a segment that was captured elsewhere."""
        return self._prefiller.store(payloads, tokens)

    def tokens_before(self, conditioning: Conditioning) -> int:
        """How many tokens a chunk is computed behind."""
        return sum(map(len, self._texts[conditioning]))

    def system_payloads(self) -> Payloads | None:
        """The KV of what stands before the first document; None where nothing does."""
        texts = self._texts["system"]
        return self._prefix(texts) if texts else None

    def _prefix(self, texts: Sequence[Sequence[int]]) -> Payloads:
        """The KV of the last of `texts`, behind the others."""
        key = tuple(token for text in texts for token in text)
        if key not in self._kept:
            self._kept[key] = self._prefiller.store(self._behind(texts[:-1], texts[-1]), len(texts[-1]))
        return self._kept[key]

    def _behind(
        self, texts: Sequence[Sequence[int]], ids: Sequence[int], known: Mapping[int, Payloads] | None = None
    ) -> Payloads:
        """The KV of `ids` behind `texts`; `known` has that of some of them by their index."""
        known = known or {}
        layout = PromptLayout.of([(SegmentKind.CHUNK, text) for text in (*texts, ids)])
        payloads = {
            layout.segments[i].start: known[i] if i in known else self._prefix(texts[: i + 1])
            for i in range(len(texts))
        }
        plan = BlendPlan.of(layout, [*[Reuse.EXACT] * len(texts), Reuse.FRESH], 0.0)
        done = self._prefiller.run(plan, PlainSelector(), payloads, captures=(len(texts),))
        try:
            return captured(done, 0)
        finally:
            self._prefiller.release(done)


def captured(done: Prefilled, index: int) -> Payloads:
    """The payloads of the prefill's capture number `index`, as computed."""
    capture = done.state.capture
    if capture is None:
        raise ValueError("nothing was captured")
    return capture.payloads(index)
