"""Everything of one device behind one synchronous object: sequences, ticks, sampling, text. Called by one thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.capture import Capture
from kvblend.engine.contrast import contrast
from kvblend.engine.kv import KVPool
from kvblend.engine.layout import BlendPlan, Reuse
from kvblend.engine.model import Model
from kvblend.engine.output import OutputText
from kvblend.engine.sampling import SamplingPlan, sample
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.sequence import LayerSource, SequenceState
from kvblend.engine.step import Outcome, Step, WorkItem


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What the runner must know to run one prompt. `output` None computes the prompt and samples nothing.

    `contrast` is the index of a segment before the last: without it the last one is computed a second time, and its
    captured KV is that of both (`engine.contrast`).
    """

    request_id: str
    plan: BlendPlan
    selector: Selector
    tokens_max: int
    source: LayerSource | None = None
    captures: tuple[int, ...] = ()
    sampling: SamplingPlan | None = None
    output: OutputText | None = None
    contrast: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Figures of a finished prompt; see architecture.md, Definitions."""

    tokens_reused: int
    tokens_recomputed: int
    tokens_fresh: int
    charged_ratio: float
    parity_error: float


@dataclass(frozen=True, slots=True)
class TickResult:
    """What one tick did for one sequence. `layer` is the one a stalled sequence waits for."""

    request_id: str
    status: Literal["running", "stalled", "sampled", "prefilled", "cancelled", "failed"]
    rows: int = 0
    layer: int = 0
    token_id: int = -1
    text: str = ""
    stopped: bool = False
    figures: PrefillFigures | None = None
    error: str = ""


@dataclass(slots=True, eq=False)
class _Running:
    spec: SequenceSpec
    state: SequenceState
    figures_sent: bool = False
    first: SequenceState | None = None


class Runner:
    """Runs sequences on one model. All methods but `flag_cancelled` belong to the device thread."""

    def __init__(self, model: Model, backend: AttentionBackend, pool: KVPool) -> None:
        self.model = model
        self.pool = pool
        self.step = Step(model, backend)
        self._running: dict[str, _Running] = {}

    @property
    def request_ids(self) -> Collection[str]:
        """Sequences that hold KV slots."""
        return self._running.keys()

    def start(self, spec: SequenceSpec) -> None:
        """Reserve KV slots and make the sequence ready. Raises KVExhausted or ValueError; nothing is held then."""
        if spec.request_id in self._running:
            raise ValueError(f"sequence {spec.request_id} is running already")
        config, plan = self.model.config, spec.plan
        capture = None
        if spec.captures:
            spans = [(plan.layout.segments[i].start, plan.layout.segments[i].end) for i in spec.captures]
            dtype = self.model.dtype
            capture = Capture(spans, config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        slab = self.pool.reserve(spec.tokens_max)
        try:
            state = SequenceState.start(
                spec.request_id, plan, spec.selector, slab, config.num_layers, spec.source, capture
            )
        except BaseException:
            self.pool.release(slab)
            raise
        self._running[spec.request_id] = _Running(spec, state)

    def free(self, request_id: str) -> None:
        """Give a sequence's KV slots back; unknown ids are ignored."""
        running = self._running.pop(request_id, None)
        if running is not None:
            self.pool.release(running.state.slab)

    def flag_cancelled(self, request_id: str) -> None:
        """Make a running tick leave this sequence at the next layer. May be called from any thread."""
        running = self._running.get(request_id)
        if running is not None:
            running.state.cancelled = True

    def payloads(self, request_id: str, segment: int) -> list[memoryview]:
        """The captured KV of one segment, one payload per layer. Raises KeyError or ValueError where there is none."""
        running = self._running[request_id]
        state = running.first or running.state
        if state.capture is None:
            raise ValueError(f"nothing of {request_id} is captured")
        payloads = state.capture.payloads(running.spec.captures.index(segment))
        if running.first is None or segment != len(running.spec.plan.layout.segments) - 1:
            return payloads
        config, alone = self.model.config, running.state.capture
        assert alone is not None  # made with the second computing
        return contrast(payloads, alone.payloads(0), config.num_kv_heads, config.head_dim, self.model.dtype)

    @torch.inference_mode()
    def tick(self, items: Sequence[tuple[str, int]]) -> list[TickResult]:
        """One sweep over `(request id, rows at most)`; sequences that reach their last row sample a token."""
        known = [(self._running[request_id], rows) for request_id, rows in items if request_id in self._running]
        outcomes = self.step.run([WorkItem(running.state, rows) for running, rows in known])
        pairs = list(zip([running for running, _ in known], outcomes, strict=True))
        tokens = self._sample([(running, outcome) for running, outcome in pairs if running.spec.output is not None])
        return [self._result(running, outcome, tokens) for running, outcome in pairs]

    def _sample(self, pairs: list[tuple[_Running, Outcome]]) -> dict[str, int | str]:
        """Token id per request that reached its last row; or what is wrong with its logits."""
        ready = [(running, outcome.hidden) for running, outcome in pairs if outcome.hidden is not None]
        if not ready:
            return {}
        logits = self.model.logits(torch.stack([hidden for _, hidden in ready]))
        plans = [running.spec.sampling or SamplingPlan(0.0, 1.0, 0) for running, _ in ready]
        positions = [running.state.num_computed_tokens for running, _ in ready]
        ids = [running.spec.request_id for running, _ in ready]
        try:
            return dict(zip(ids, sample(logits, plans, positions), strict=True))
        except ValueError:
            return {name: _sample_one(logits[i], plans[i], positions[i]) for i, name in enumerate(ids)}

    def _result(self, running: _Running, outcome: Outcome, tokens: dict[str, int | str]) -> TickResult:
        spec, state = running.spec, running.state
        if outcome.status == "last_row" and spec.contrast is not None and running.first is None:
            self._compute_alone(running, spec.contrast)
            return TickResult(spec.request_id, "running", outcome.rows)
        figures = self._figures(running)
        if outcome.status != "last_row":
            return TickResult(spec.request_id, outcome.status, outcome.rows, outcome.layer)
        if spec.output is None:
            return TickResult(spec.request_id, "prefilled", outcome.rows, figures=figures)
        token = tokens[spec.request_id]
        if isinstance(token, str):
            return TickResult(spec.request_id, "failed", outcome.rows, error=token, figures=figures)
        piece = spec.output.push(token)
        # the last token's row is never computed: its slot may lie behind the reservation
        if not piece.stopped and state.num_computed_tokens < spec.tokens_max:
            state.append_token(token)
        return TickResult(
            spec.request_id,
            "sampled",
            outcome.rows,
            token_id=token,
            text=piece.text,
            stopped=piece.stopped,
            figures=figures,
        )

    def _compute_alone(self, running: _Running, left_out: int) -> None:
        """Begin the second computing of the last segment, over what stands before segment `left_out`, in its slots."""
        first, config = running.state, self.model.config
        layout = running.spec.plan.layout.without(left_out)
        segment = layout.segments[-1]
        marks = [Reuse.EXACT] * (len(layout.segments) - 1) + [Reuse.FRESH]
        capture = Capture(
            [(segment.start, segment.end)], config.num_layers, config.num_kv_heads, config.head_dim, self.model.dtype
        )
        plan = BlendPlan.of(layout, marks, 0.0)
        state = SequenceState.start(
            running.spec.request_id, plan, PlainSelector(), first.slab, config.num_layers, capture=capture
        )
        # the segments before it lie in the slab since the first computing, turned by its tables
        state.installed, state.ropes = config.num_layers, first.ropes
        running.first, running.state = first, state
        # a cancel before the exchange flagged the state that is gone; one behind it, of another thread, must stay
        if first.cancelled:
            state.cancelled = True

    def _figures(self, running: _Running) -> PrefillFigures | None:
        state = running.first or running.state
        if running.figures_sent or state.num_computed_tokens < state.num_prompt_tokens:
            return None
        running.figures_sent = True
        reused, recomputed, fresh = state.count_tokens()
        return PrefillFigures(reused, recomputed, fresh, state.charged_ratio, state.parity_error)


def _sample_one(logits: torch.Tensor, plan: SamplingPlan, position: int) -> int | str:
    try:
        return sample(logits[None], [plan], [position])[0]
    except ValueError as error:
        return str(error)
