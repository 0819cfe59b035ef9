"""How far each of kvblend's modes is from the full prefill on the workload of `bench/peers.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from peer_own import MODES, STORE_DTYPE, OwnMode

from kvblend.actors.settings import DEFAULT_SYSTEM
from kvblend.engine.attention.choose import choose_backend
from kvblend.engine.conditioning import passages_of, warm_ids
from kvblend.engine.evaluation.chunk_kv import ChunkKV, Payloads, Prefiller, captured
from kvblend.engine.evaluation.metrics import kl_per_position
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse
from kvblend.engine.loaders.load import LoadedModel
from kvblend.engine.precision import Precision
from kvblend.engine.prompt import system_ids
from kvblend.engine.recommended import Conditioning, recommended
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.step import Step

CONTINUATION_TOKENS = 16


def selector_of(mode: OwnMode) -> Selector:
    """How a mode chooses rows, as the systems of `bench/peer_own.py` are set."""
    if mode.ratio is None:
        return PlainSelector()
    return build_selector(SelectorSpec() if mode.system == "system" else recommended(mode.ratio).spec)


class Examined:
    """The model and the chunks' KV, each computed once behind each text."""

    def __init__(self, loaded: LoadedModel, corpus: str) -> None:
        model = loaded.model
        backend, _ = choose_backend("auto", model.device, model.dtype)
        pool = SlabPool(model.config, 4 * model.config.context_length, model.dtype, model.device)
        self._prefiller = Prefiller(Step(model, backend), pool, Precision.of_model(model, STORE_DTYPE))
        before = system_ids(loaded.tokenizer, loaded.template, DEFAULT_SYSTEM)
        text = warm_ids(loaded.tokenizer, model.config.context_length, passages_of(corpus))
        self._chunks = ChunkKV(self._prefiller, before, text, text)
        self._known: dict[tuple[Conditioning, tuple[int, ...]], Payloads] = {}

    def kl_of(self, layout: PromptLayout) -> dict[str, float]:
        """Mean KL in nats per token over the full prefill's own greedy continuation, by mode."""
        first = next(index for index, _ in layout.chunks())
        fresh = BlendPlan.of(layout, [Reuse.FRESH] * len(layout.segments), 0.0)
        extra = CONTINUATION_TOKENS
        full = self._prefiller.run(fresh, PlainSelector(), captures=(first,), tokens_extra=extra)
        try:
            exact = captured(full, 0)
            continuation = full.continue_greedily(CONTINUATION_TOKENS, ())
            wanted = full.force(continuation).clone()
        finally:
            self._prefiller.release(full)
        found = {}
        for name, mode in MODES.items():
            if mode.mode == "full":
                continue
            marks = [Reuse.EXACT if index <= first else Reuse.CACHED for index in range(len(layout.segments) - 1)]
            plan = BlendPlan.of(layout, [*marks, Reuse.FRESH], mode.ratio or 0.0)
            payloads = self._payloads(layout, "system" if mode.system == "system" else "corpus", exact)
            done = self._prefiller.run(plan, selector_of(mode), payloads, tokens_extra=extra)
            try:
                found[name] = statistics.fmean(kl_per_position(wanted, done.force(continuation)))
            finally:
                self._prefiller.release(done)
        return found

    def _payloads(self, layout: PromptLayout, conditioning: Conditioning, exact: Payloads) -> dict[int, Payloads]:
        system = self._chunks.system_payloads()
        found = {} if system is None else {0: system}
        for number, (_, segment) in enumerate(layout.chunks()):
            key = conditioning, segment.token_ids
            if number and key not in self._known:
                self._known[key] = self._chunks.compute(conditioning, segment.token_ids)
            stored = self._known[key] if number else self._chunks.store(exact, len(segment.token_ids))
            found[segment.start] = stored
        return found


def mean_kl(loaded: LoadedModel, corpus: str, layouts: Sequence[PromptLayout]) -> dict[str, float]:
    """The mean over prompts, by mode."""
    with torch.inference_mode():
        examined = Examined(loaded, corpus)
        each = [examined.kl_of(layout) for layout in layouts]
    return {name: statistics.fmean(kl[name] for kl in each) for name in each[0]}
