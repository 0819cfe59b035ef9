"""One running sequence on the device: its KV slots, its passes and how far they have come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from kvblend.engine.capture import Capture
from kvblend.engine.kv import KVSlab
from kvblend.engine.layout import BlendPlan, Reuse, SegmentKind
from kvblend.engine.payloads import LayerSource
from kvblend.engine.precision import Precision
from kvblend.engine.repeats import Repeats
from kvblend.engine.rope import RopeTable
from kvblend.engine.selectors.base import Observation, Pass, Passes, SelectionContext, Selector


@dataclass(slots=True)
class Charges:
    """What was computed, for `charged_ratio` (architecture.md, Definitions)."""

    cached_row_layers: int = 0
    question_row_layers: int = 0


@dataclass(slots=True, eq=False)
class Frontier:
    """Where the last pass ended: `hidden` are the inputs of `layer` for `rows`; `q` where that layer was projected."""

    layer: int
    rows: torch.Tensor
    hidden: torch.Tensor
    q: torch.Tensor | None


@dataclass(slots=True, eq=False)
class Slice:
    """The rows of the current pass that are on their way: `hidden [rows, hidden]` is the input of `layer`.

    `fresh` are K (not rotated), K and V of `layer` that were projected and not written yet. What layers share is made
    when the first of them asks: attention plans by window, cos and sin `[rows, 1, dim]` for plain and windowed layers.
    """

    rows: torch.Tensor
    rows_device: torch.Tensor
    layer: int
    hidden: torch.Tensor
    q: torch.Tensor | None
    fresh: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    plans: dict[int | None, Any] = field(default_factory=dict)
    turns: dict[bool, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    cached_rows: int = 0
    question_rows: int = 0


def _span_rows(spans: list[tuple[int, int]]) -> torch.Tensor:
    parts = [torch.arange(start, end) for start, end in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def selection_context(plan: BlendPlan, num_layers: int, slots: int = 0) -> SelectionContext:
    """The selector's view of a plan; `slots` positions are reserved for the sequence."""
    question = plan.layout.segments[-1]
    return SelectionContext(
        num_layers=num_layers,
        num_tokens=plan.layout.num_tokens,
        cached_rows=_span_rows(plan.spans(Reuse.CACHED)),
        fresh_rows=_span_rows(plan.spans(Reuse.FRESH)),
        question_rows=torch.arange(question.start, question.end),
        budget=plan.budget,
        cached_spans=tuple(
            (segment.start, segment.end)
            for segment, mark in zip(plan.layout.segments, plan.reuse, strict=True)
            if mark is Reuse.CACHED
        ),
        slots=slots,
    )


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence between two steps. Written by the device thread only, but for `cancelled`.

    `precision` is the form of what `source` hands out; None: the compute dtype.
    """

    request_id: str
    plan: BlendPlan
    slab: KVSlab
    num_layers: int
    passes: Passes
    context: SelectionContext
    token_ids: torch.Tensor
    repeats: Repeats
    source: LayerSource | None = None
    capture: Capture | None = None
    ropes: tuple[RopeTable, RopeTable] | None = None
    precision: Precision | None = None
    installed: int = 0
    current: Pass | None = None
    rows_started: int = 0
    slice: Slice | None = None
    frontier: Frontier | None = None
    partial: list[Frontier] = field(default_factory=list)
    observation: Observation | None = None
    num_computed_tokens: int = 0
    charges: Charges = field(default_factory=Charges)
    recomputed_rows: int = 0
    sensitivity: torch.Tensor | None = None
    parity_error: float = 0.0
    cancelled: bool = False

    @classmethod
    def start(
        cls,
        request_id: str,
        plan: BlendPlan,
        selector: Selector,
        slab: KVSlab,
        num_layers: int,
        source: LayerSource | None = None,
        capture: Capture | None = None,
        *,
        filled: bool = False,
    ) -> Self:
        """A sequence before its first step; `filled`: the slots of the rows that are not fresh hold their KV already.

        Raises ValueError where nothing is left to compute, RuntimeError for a first pass that cannot run.
        """
        context = selection_context(plan, num_layers, slab.capacity)
        if plan.reuse[-1] is not Reuse.FRESH:
            raise ValueError("the last segment of a prompt must be computed fresh: its last row gives the first token")
        capacity = slab.capacity
        token_ids = torch.zeros(capacity, dtype=torch.int64)
        token_ids[: plan.layout.num_tokens] = torch.tensor(plan.layout.token_ids, dtype=torch.int64)
        needs_source = not filled and any(mark is not Reuse.FRESH for mark in plan.reuse)
        state = cls(
            request_id,
            plan,
            slab,
            num_layers,
            selector.passes(context),
            context,
            token_ids,
            Repeats(plan.layout),
            source if needs_source else None,
            capture,
            installed=0 if needs_source else num_layers,
        )
        state.current = next(state.passes)
        check_pass(state.current, num_layers)
        if state.current.layers.start:
            raise RuntimeError(f"the first pass starts at layer {state.current.layers.start}; it must start at 0")
        return state

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.plan.layout.num_tokens

    @property
    def prefilled(self) -> bool:
        """Whether every pass of the prompt is done."""
        return self.current is None

    @property
    def rows_left(self) -> int:
        """Rows of the current pass that no slice has taken yet, the running slice's included."""
        if self.current is None:
            return 0
        running = self.slice.rows.shape[0] if self.slice is not None else 0
        return int(self.current.rows.shape[0]) - self.rows_started + running

    def end_of(self, start: int) -> int:
        """The end of the segment that starts at position `start`. StopIteration where none does."""
        return next(segment.end for segment in self.plan.layout.segments if segment.start == start)

    def note_sensitivity(self, start: int, layer: torch.Tensor | None) -> None:
        """Add one layer's sensitivity (float32 `[tokens]`) of the segment at `start`; None: it was stored without."""
        if layer is None:
            return
        if self.sensitivity is None:
            self.sensitivity = torch.full((self.num_prompt_tokens,), torch.nan)
        span = self.sensitivity[start : start + layer.shape[0]]
        span.copy_(torch.where(span.isnan(), layer, span + layer))

    def append_token(self, token_id: int) -> None:
        """Queue a sampled token as the next row: a one-row pass through all layers."""
        position = self.num_computed_tokens
        self.token_ids[position] = token_id
        self.current = Pass(range(self.num_layers), torch.tensor([position]))
        self.rows_started = 0
        self.frontier = None

    def end_pass(self) -> None:
        """Hand the pass's observation to the selector and take the next pass, if any."""
        assert self.current is not None  # called by the step for a running pass only
        observation = self.observation or Observation(self.current.rows)
        if observation.attention is not None:
            observation.attention = observation.attention.cpu()
        observation.sensitivity = self.sensitivity
        self.observation = None
        self.frontier = join_frontiers(self.partial)
        self.partial = []
        self.rows_started = 0
        previous, self.current = self.current, None
        if self.num_computed_tokens < self.num_prompt_tokens:
            try:
                self.current = self.passes.send(observation)
            except StopIteration:
                self._finish_prompt(previous)
                return
            self._check_follows(previous, self.current)
            self._prepare(self.current)
        else:
            self.num_computed_tokens += int(previous.rows.shape[0])

    def last_hidden(self) -> torch.Tensor:
        """The last layer's output `[hidden_size]` of the last row that counts: drafts behind the prompt do not."""
        assert self.frontier is not None  # the pass had rows
        last = self.num_computed_tokens - 1
        rows = self.frontier.rows
        return self.frontier.hidden[int(torch.searchsorted(rows, last)) if int(rows[-1]) > last else -1]

    def _prepare(self, following: Pass) -> None:
        if following.drafts:
            self.token_ids[self.num_prompt_tokens :][: len(following.drafts)] = torch.tensor(following.drafts)
        if following.restores:
            self.installed, self.sensitivity = 0, None

    def _finish_prompt(self, previous: Pass) -> None:
        complete = previous.stop == "output" and previous.layers.stop == self.num_layers
        if not complete or not bool((previous.rows == self.num_prompt_tokens - 1).any()):
            raise RuntimeError("the selector ended before the prompt's last row left the last layer")
        self.num_computed_tokens = self.num_prompt_tokens
        self.recomputed_rows = int(torch.isin(previous.rows, self.context.cached_rows).sum())
        self.source = None

    def _check_follows(self, previous: Pass, following: Pass) -> None:
        check_pass(following, self.num_layers)
        ended = previous.layers.stop - (1 if previous.stop == "qkv" else 0)
        start = following.layers.start
        if start not in (0, ended):
            raise RuntimeError(f"a pass starts at layer {start}; it may start at 0 or {ended}")
        if start and not bool(torch.isin(following.rows, previous.rows).all()):
            raise RuntimeError(f"a pass starts at layer {start} with rows that the pass before it did not compute")

    def count_tokens(self) -> tuple[int, int, int]:
        """(reused, recomputed, fresh) tokens of the prompt, once its passes are done.

        Recomputed are the cached rows that went through the last layer: a selector may choose fewer than it might.
        """
        recomputed = self.recomputed_rows
        fresh = int(self.context.fresh_rows.shape[0])
        return self.num_prompt_tokens - recomputed - fresh, recomputed, fresh

    @property
    def charged_ratio(self) -> float:
        """Share of the cached rows' work that was done again; 1 where nothing was reused, 0 for plain reuse."""
        cached = int(self.context.cached_rows.shape[0])
        if cached == 0:
            return 0.0 if any(mark is Reuse.EXACT for mark in self._chunk_marks()) else 1.0
        question = self.num_layers * int(self.context.question_rows.shape[0])
        extra = max(0, self.charges.question_row_layers - question)
        return (self.charges.cached_row_layers + extra) / (self.num_layers * cached)

    def _chunk_marks(self) -> list[Reuse]:
        pairs = zip(self.plan.layout.segments, self.plan.reuse, strict=True)
        return [mark for segment, mark in pairs if segment.kind is SegmentKind.CHUNK]


def check_pass(given: Pass, num_layers: int) -> None:
    """RuntimeError for a pass of a selector that the step would run wrongly or never end."""
    layers, rows = given.layers, given.rows
    if not layers or layers.step != 1 or layers.stop > num_layers:
        raise RuntimeError(f"a pass runs {layers}; it needs neighbouring layers within 0..{num_layers - 1}")
    if rows.shape[0] == 0 or bool((rows[1:] <= rows[:-1]).any()):
        raise RuntimeError("the rows of a pass must be strictly ascending, and at least one")


def join_frontiers(parts: list[Frontier]) -> Frontier | None:
    """One frontier of a pass's slices, which are in row order and end at the same layer."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    queries = [part.q for part in parts if part.q is not None]
    return Frontier(
        parts[0].layer,
        torch.cat([part.rows for part in parts]),
        torch.cat([part.hidden for part in parts]),
        torch.cat(queries) if len(queries) == len(parts) else None,
    )
