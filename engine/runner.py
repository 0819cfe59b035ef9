"""Everything of one device behind one synchronous object: sequences, ticks, sampling, text. Called by one thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.capture import Capture
from kvblend.engine.choosing import Choice, Chooser, choose
from kvblend.engine.contrast import contrast
from kvblend.engine.kept_layers import KeptLayers
from kvblend.engine.kv import KVPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse
from kvblend.engine.logprobs import TokenLogprob
from kvblend.engine.model import Model
from kvblend.engine.output import OutputText
from kvblend.engine.payloads import LayerSource
from kvblend.engine.precision import Precision
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.bounded import BoundedSelector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.sequence import SequenceState
from kvblend.engine.step import Outcome, Step, WorkItem


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What the runner must know to run one prompt. `output` None computes the prompt and samples nothing.

    `contrast` is the index of a segment before the last: without it the last one is computed a second time, and its
    captured KV is that of both (`engine.contrast`). With `echo` it is computed behind a copy of itself, too, and that
    KV stands behind the other; `tokens_max` has room for the copy. `continues` names a sequence that was not freed and
    how many of its first tokens this one begins with: rows that are not fresh in `plan`.
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
    echo: bool = False
    continues: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Figures of a finished prompt; see architecture.md, Definitions.

    Where its KL was bounded: `recompute_ratio` is the share that was recomputed in the end, `ratios_tried` are those
    before it that were not enough, and `kl_estimate` is what the KL is estimated not to exceed.
    """

    tokens_reused: int
    tokens_recomputed: int
    tokens_fresh: int
    charged_ratio: float
    parity_error: float
    recompute_ratio: float | None = None
    kl_estimate: float | None = None
    ratios_tried: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TickResult:
    """What one tick did for one sequence. `layer` is the one a stalled sequence waits for. `lost`: it never started,
    what it was to continue is not there.

    `rows` were started or went on, `row_layers` counts the rows computed layer by layer: what the tick's time is for.
    """

    request_id: str
    status: Literal["running", "stalled", "sampled", "prefilled", "cancelled", "failed", "lost"]
    rows: int = 0
    layer: int = 0
    token_id: int = -1
    text: str = ""
    stopped: bool = False
    figures: PrefillFigures | None = None
    error: str = ""
    row_layers: int = 0
    logprob: TokenLogprob | None = None


@dataclass(slots=True, eq=False)
class _Running:
    spec: SequenceSpec
    state: SequenceState
    chooser: Chooser
    figures_sent: bool = False
    takes: list[SequenceState] = field(default_factory=list)


class Runner:
    """Runs sequences on one model. All methods but `flag_cancelled` belong to the device thread."""

    def __init__(self, model: Model, backend: AttentionBackend, pool: KVPool) -> None:
        self.model = model
        self.pool = pool
        self.precision = Precision.of_model(model)
        self.step = Step(model, backend)
        self._running: dict[str, _Running] = {}
        self._lost: set[str] = set()

    @property
    def request_ids(self) -> Collection[str]:
        """Sequences that hold KV slots."""
        return self._running.keys()

    def start(self, spec: SequenceSpec) -> None:
        """Reserve KV slots and make the sequence ready. Raises KVExhausted or ValueError; nothing is held then.

        Where it continues what is not there (freed, lost with whoever ran it, or other tokens) nothing is held either,
        and its ticks say `lost` until it is freed: that is no error of those who run beside it.
        """
        if spec.request_id in self._running:
            raise ValueError(f"sequence {spec.request_id} is running already")
        earlier = self._earlier(spec)
        if spec.continues is not None and earlier is None:
            self._lost.add(spec.request_id)
            return
        config, plan = self.model.config, spec.plan
        capture = None
        if spec.captures:
            spans = [(plan.layout.segments[i].start, plan.layout.segments[i].end) for i in spec.captures]
            dtype = self.model.dtype
            capture = Capture(spans, config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        slab = self.pool.reserve(spec.tokens_max)
        try:
            layers, filled = config.num_layers, spec.continues is not None
            state = SequenceState.start(
                spec.request_id, plan, spec.selector, slab, layers, _source(spec), capture, filled=filled
            )
            if spec.continues is not None and earlier is not None:
                state.slab.copy_from(earlier.slab, spec.continues[1])
        except BaseException:
            self.pool.release(slab)
            raise
        state.precision = self.precision
        chooser = Chooser(spec.sampling or SamplingPlan(0.0, 1.0, 0), plan.layout.token_ids)
        self._running[spec.request_id] = _Running(spec, state, chooser)

    def _earlier(self, spec: SequenceSpec) -> SequenceState | None:
        """The sequence that this one continues; None where there is none that computed exactly these tokens."""
        name, tokens = spec.continues or ("", 0)
        known = self._running.get(name)
        if known is None or known.state.num_computed_tokens < tokens:
            return None
        same = known.state.token_ids[:tokens].tolist() == list(spec.plan.layout.token_ids[:tokens])
        return known.state if same else None

    def free(self, request_id: str) -> None:
        """Give a sequence's KV slots back; unknown ids are ignored."""
        self._lost.discard(request_id)
        running = self._running.pop(request_id, None)
        if running is not None:
            self.pool.release(running.state.slab)

    def flag_cancelled(self, request_id: str) -> None:
        """Make a running tick leave this sequence at the next layer. May be called from any thread."""
        running = self._running.get(request_id)
        if running is not None:
            running.state.cancelled = True

    def payloads(self, request_id: str, segment: int) -> list[memoryview]:
        """The captured KV of one segment in its stored form, one payload per layer.

        Raises KeyError or ValueError where there is none, UnstorableKV where it cannot be stored in that form.
        """
        segments = self._running[request_id].spec.plan.layout.segments
        tokens = segments[segment].end - segments[segment].start
        return [self.precision.encode(payload, tokens) for payload in self._computed(request_id, segment)]

    def _computed(self, request_id: str, segment: int) -> list[memoryview]:
        """The captured KV of one segment as it was computed."""
        running = self._running[request_id]
        state = running.takes[0] if running.takes else running.state
        if state.capture is None:
            raise ValueError(f"nothing of {request_id} is captured")
        payloads = state.capture.payloads(running.spec.captures.index(segment))
        if not running.takes or segment != len(running.spec.plan.layout.segments) - 1:
            return payloads
        config = self.model.config
        *echo, alone = [take.capture.payloads(0) for take in (*running.takes[1:], running.state) if take.capture]
        shape = (config.num_kv_heads, config.head_dim, self.model.dtype)
        return contrast(payloads, alone, *shape, echo=echo[0] if echo else None)

    @torch.inference_mode()
    def tick(self, items: Sequence[tuple[str, int, int | None]]) -> list[TickResult]:
        """One sweep over `(request id, rows at most, layers at most)`; None: all layers.

        Sequences that reach their last row sample a token.
        """
        known = [(self._running[name], rows, layers) for name, rows, layers in items if name in self._running]
        outcomes = self.step.run([WorkItem(running.state, rows, layers) for running, rows, layers in known])
        pairs = list(zip([running for running, _, _ in known], outcomes, strict=True))
        tokens = self._sample([(running, outcome) for running, outcome in pairs if running.spec.output is not None])
        results = [self._result(running, outcome, tokens) for running, outcome in pairs]
        done = [replace(result, row_layers=o.row_layers) for result, (_, o) in zip(results, pairs, strict=True)]
        return done + [TickResult(name, "lost") for name, _, _ in items if name in self._lost]

    def _sample(self, pairs: list[tuple[_Running, Outcome]]) -> dict[str, Choice | str]:
        """The token of every request that reached its last row; or what is wrong with its logits."""
        ready = [(running, outcome.hidden) for running, outcome in pairs if outcome.hidden is not None]
        if not ready:
            return {}
        logits = self.model.logits(torch.stack([hidden for _, hidden in ready]))
        positions = [running.state.num_computed_tokens for running, _ in ready]
        choices = choose(logits, [running.chooser for running, _ in ready], positions)
        return dict(zip([running.spec.request_id for running, _ in ready], choices, strict=True))

    def _result(self, running: _Running, outcome: Outcome, tokens: dict[str, Choice | str]) -> TickResult:
        spec, state = running.spec, running.state
        if outcome.status == "last_row" and (layout := _next_take(running)) is not None:
            self._take_again(running, layout)
            return TickResult(spec.request_id, "running", outcome.rows)
        figures = self._figures(running)
        if outcome.status != "last_row":
            return TickResult(spec.request_id, outcome.status, outcome.rows, outcome.layer)
        if spec.output is None:
            return TickResult(spec.request_id, "prefilled", outcome.rows, figures=figures)
        choice = tokens[spec.request_id]
        if isinstance(choice, str):
            return TickResult(spec.request_id, "failed", outcome.rows, error=choice, figures=figures)
        logprob, piece = spec.output.describe(choice), spec.output.push(choice.token_id)
        # the last token's row is never computed: its slot may lie behind the reservation
        if not piece.stopped and state.num_computed_tokens < spec.tokens_max:
            state.append_token(choice.token_id)
        return TickResult(
            spec.request_id,
            "sampled",
            outcome.rows,
            token_id=choice.token_id,
            text=piece.text,
            stopped=piece.stopped,
            figures=figures,
            logprob=logprob,
        )

    def _take_again(self, running: _Running, layout: PromptLayout) -> None:
        """Begin to compute the last segment of `layout`; what stands before it is in the slots as it is there."""
        first, config = running.state, self.model.config
        segment = layout.segments[-1]
        marks = [Reuse.EXACT] * (len(layout.segments) - 1) + [Reuse.FRESH]
        capture = Capture(
            [(segment.start, segment.end)], config.num_layers, config.num_kv_heads, config.head_dim, self.model.dtype
        )
        plan = BlendPlan.of(layout, marks, 0.0)
        state = SequenceState.start(
            running.spec.request_id, plan, PlainSelector(), first.slab, config.num_layers, capture=capture
        )
        # turned by the first computing's tables
        state.installed, state.ropes = config.num_layers, first.ropes
        running.takes.append(first)
        running.state = state
        # a cancel before the exchange flagged the state that is gone; one behind it, of another thread, must stay
        if first.cancelled:
            state.cancelled = True

    def _figures(self, running: _Running) -> PrefillFigures | None:
        state = running.takes[0] if running.takes else running.state
        if running.figures_sent or state.num_computed_tokens < state.num_prompt_tokens:
            return None
        running.figures_sent = True
        done = PrefillFigures(*state.count_tokens(), state.charged_ratio, state.parity_error)
        bounded = running.spec.selector
        if not isinstance(bounded, BoundedSelector) or not bounded.rungs:
            return done
        tried = tuple(rung.shown.ratio for rung in bounded.rungs[:-1])
        return replace(done, recompute_ratio=bounded.ratio, kl_estimate=bounded.kl_estimate, ratios_tried=tried)


def _source(spec: SequenceSpec) -> LayerSource | None:
    """Where the cached layers come from; a blend that may be raised takes them more than once."""
    raises = isinstance(spec.selector, BoundedSelector)
    return KeptLayers(spec.source) if raises and spec.source is not None else spec.source


def _next_take(running: _Running) -> PromptLayout | None:
    """The prompt in which the last segment is to be computed next; the one without a segment comes last, because it
    writes over that segment's slots.
    """
    spec, layout = running.spec, running.spec.plan.layout
    if spec.contrast is None:
        return None
    layouts = [*([layout.with_echo()] if spec.echo else []), layout.without(spec.contrast)]
    return layouts[len(running.takes)] if len(running.takes) < len(layouts) else None
