"""The prompts of `bench/stages.py` and `bench/scaling.py`: chunks with random KV, run on the engine alone."""

from __future__ import annotations

from collections.abc import Generator

import torch
from stage_clock import StageClock

from kvblend.engine.attention.choose import choose_backend
from kvblend.engine.capture import tensor_bytes
from kvblend.engine.evaluation.chunk_kv import Payloads, PayloadSource
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.loaders.load import LoadedModel
from kvblend.engine.recommended import recommended
from kvblend.engine.selectors.base import Observation, Pass, Passes, SelectionContext, Selector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.sequence import SequenceState
from kvblend.engine.step import Step, WorkItem

QUESTION_TOKENS, SYSTEM_TOKENS, ALL_ROWS = 40, 30, 1 << 30
MODES: dict[str, float | None] = {"full": None, "divergence@0.15": 0.15, "query@0.05": 0.05, "question_only": 0.0}


class Watched:
    """A selector that notes its passes."""

    def __init__(self, inner: Selector) -> None:
        self.name = inner.name
        self.passed: list[Pass] = []
        self._inner = inner

    def passes(self, context: SelectionContext) -> Passes:
        """The other selector's passes."""
        running: Generator[Pass, Observation, None] = self._inner.passes(context)
        found = next(running)
        while True:
            self.passed.append(found)
            seen = yield found
            try:
                found = running.send(seen)
            except StopIteration:
                return


class StageWork:
    """One prompt of `chunks` chunks; every chunk but the first is a cached one."""

    def __init__(self, loaded: LoadedModel, chunks: int, chunk_tokens: int) -> None:
        model = loaded.model
        self.config = model.config
        backend, _ = choose_backend("sdpa", model.device, model.dtype)
        parts = [(SegmentKind.SYSTEM, SYSTEM_TOKENS), *[(SegmentKind.CHUNK, chunk_tokens)] * chunks]
        parts.append((SegmentKind.QUESTION, QUESTION_TOKENS))
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(100, self.config.vocab_size, (size,), generator=generator).tolist() for _, size in parts]
        self._layout = PromptLayout.of([(kind, row) for (kind, _), row in zip(parts, ids, strict=True)])
        self.num_tokens = self._layout.num_tokens
        self._pool = SlabPool(self.config, 5 * self.num_tokens + 64, model.dtype, model.device)
        self._step = Step(model, backend)
        sizes = {segment.start: len(segment.token_ids) for segment in self._layout.segments[:-1]}
        self._payloads = {start: self._random(size, generator, start > 0) for start, size in sizes.items()}

    def run(self, mode: str, clock: StageClock | None = None, count: int = 1) -> list[tuple[int, int]]:
        """Run `count` such prompts to their first token, together.

        `(rows, pairs)` of every layer that one of them ran: rows, and keys that they see in all. A `clock` is set back
        first.
        """
        return self.run_ratio(MODES[mode], mode.startswith("query"), clock, count)

    @torch.inference_mode()
    def run_ratio(
        self, ratio: float | None, guided: bool, clock: StageClock | None = None, count: int = 1
    ) -> list[tuple[int, int]]:
        """`run` for any share of rows, chosen as recommended where `guided`; None: a full prefill."""
        segments = len(self._layout.segments)
        marks = [Reuse.EXACT, Reuse.EXACT, *[Reuse.CACHED] * (segments - 3), Reuse.FRESH]
        if ratio is None:
            marks = [Reuse.FRESH] * segments
        plan = BlendPlan.of(self._layout, marks, ratio or 0.0)
        if clock is not None:
            clock.reset()
        slabs = [self._pool.reserve(self.num_tokens) for _ in range(count)]
        watched = [Watched(_selector(ratio, guided)) for _ in slabs]
        states = [
            SequenceState.start(str(i), plan, selector, slab, self.config.num_layers, PayloadSource(self._payloads))
            for i, (selector, slab) in enumerate(zip(watched, slabs, strict=True))
        ]
        hidden: list[torch.Tensor] = []
        while running := [state for state in states if not state.prefilled]:
            outcomes = self._step.run([WorkItem(state, ALL_ROWS) for state in running])
            hidden += [outcome.hidden for outcome in outcomes if outcome.hidden is not None]
        self._step.model.logits(torch.stack(hidden)).argmax(-1).tolist()
        for slab in slabs:
            self._pool.release(slab)
        return [work for given in watched[0].passed for work in counted_layers(given, self.config.num_layers)]

    def _random(self, tokens: int, generator: torch.Generator, sensitive: bool) -> Payloads:
        shape = (2, self.config.num_kv_heads, tokens, self.config.head_dim)
        layers: Payloads = []
        for _ in range(self.config.num_layers):
            kv = torch.randn(shape, generator=generator).flatten()
            behind = torch.rand(tokens, generator=generator) if sensitive else torch.empty(0)
            layers.append(tensor_bytes(torch.cat((kv, behind))))
        return layers


def _selector(ratio: float | None, guided: bool) -> Selector:
    if not ratio:
        return PlainSelector()
    return build_selector(recommended(ratio).spec if guided else SelectorSpec())


def counted_layers(given: Pass, num_layers: int) -> list[tuple[int, int]]:
    """Rows and pairs of the layers of a pass that are computed for all of its rows.

    Not of one that only projects, nor of the model's last one, behind which a single row counts.
    """
    last_row_only = given.stop == "output" and given.layers.stop == num_layers and given.observe != "attention"
    layers = len(given.layers) - (given.stop == "qkv" or last_row_only)
    return [(int(given.rows.shape[0]), int((given.rows + 1).sum()))] * layers
