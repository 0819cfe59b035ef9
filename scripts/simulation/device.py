"""A device that takes time but computes nothing: sequences pass their layers as the engine's do, at modelled costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvblend.actors.core import events as ev
from kvblend.engine.layout import BlendPlan, Reuse


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Seconds: of every step, of a row through one layer, of a key that a prompt's or a decoding row sees in one layer.

    The defaults are those of SmolLM2-135M in float32 on two cores of a server.
    """

    step_s: float = 0.05
    row_layer_s: float = 5e-5
    key_layer_s: float = 1.5e-8
    decode_key_layer_s: float = 1.5e-7

    def seconds(self, row_layers: float, keys: float, decode_keys: float = 0.0) -> float:
        """How long a step with this work takes."""
        work_s = self.row_layer_s * row_layers + self.key_layer_s * keys
        return self.step_s + work_s + self.decode_key_layer_s * decode_keys


@dataclass(frozen=True, slots=True)
class Pass:
    """`rows` rows through layers `start..stop-1`; each sees `keys` keys on average."""

    start: int
    stop: int
    rows: int
    keys: float


def passes_of(job: ev.Job, plan: BlendPlan, num_layers: int) -> list[Pass]:
    """The passes of a prompt. A blend computes all cached rows in its first layers, the chosen ones behind them."""
    fresh, cached, tokens = plan.count(Reuse.FRESH), plan.count(Reuse.CACHED), plan.layout.num_tokens

    def one(start: int, stop: int, again: int) -> Pass:
        rows = fresh + again
        return Pass(start, stop, rows, (again * tokens / 2 + fresh * (tokens - fresh / 2)) / rows)

    full = min(job.shape.full_layers, num_layers)
    if job.kind == "precompute" or not plan.budget:
        return [one(0, num_layers, 0)]
    if job.shape.waits:
        return [one(0, num_layers, 0), one(0, num_layers, plan.budget)]
    head = [one(0, full, cached)] if full else []
    return head + ([one(full, num_layers, plan.budget)] if full < num_layers else [])


@dataclass(slots=True, eq=False)
class Running:
    """One sequence: its passes, and the slice of rows that is on its way. `loaded` layers are in memory."""

    job: ev.Job
    plan: BlendPlan
    captures: tuple[int, ...]
    num_layers: int
    loaded: int
    passes: Iterator[Pass]
    current: Pass | None = None
    started: int = 0
    rows: int = 0
    layer: int = 0
    computed: int = 0
    taken: int = 0
    output: int = 0
    cancelled: bool = False
    waits_for: int | None = None

    @classmethod
    def start(cls, command: ev.StartSequence, num_layers: int) -> Running:
        """A sequence before its first step."""
        job, plan = command.job, command.plan
        needs = any(mark is not Reuse.FRESH for mark in plan.reuse)
        passes = iter(passes_of(job, plan, num_layers))
        loaded = 0 if needs else num_layers
        return cls(job, plan, command.captures, num_layers, loaded, passes, next(passes))

    def go_on(self, rows_max: int, layers_max: int | None) -> tuple[str, int, int, float]:
        """(status, rows, row-layers, keys) of one step, as `engine.step` would have it."""
        left = self.num_layers if layers_max is None else max(1, layers_max)
        work, keys = 0, 0.0
        if not self.rows:
            self._open(rows_max)
        first = self.rows
        while (current := self.current) is not None:
            while self.layer < current.stop:
                if self.layer >= self.loaded:
                    self.waits_for = self.layer
                    return "stalled", first, work, keys
                if not left:
                    return "running", first, work, keys
                work, keys, left = work + self.rows, keys + self.rows * current.keys, left - 1
                self.layer += 1
                self.taken = max(self.taken, self.layer)
            self.rows = 0
            if self.started < current.rows:
                return "running", first, work, keys
            self.current, self.started = next(self.passes, None), 0
            if self.current is not None:
                if self.current.start == 0:
                    return "running", first, work, keys
                self._open(rows_max)
        return "last_row", first, work, keys

    def _open(self, rows_max: int) -> None:
        assert self.current is not None  # only unfinished sequences go on
        self.rows = min(max(1, rows_max), self.current.rows - self.started)
        self.started, self.layer = self.started + self.rows, self.current.start

    def report(self) -> ev.PrefillReport:
        """The figures of a finished prompt."""
        plan, cached = self.plan, self.plan.count(Reuse.CACHED)
        fresh, budget = plan.count(Reuse.FRESH), plan.budget
        again = self.computed - fresh * self.num_layers
        charged = again / (self.num_layers * cached) if cached else float(fresh == plan.layout.num_tokens)
        return ev.PrefillReport(plan.layout.num_tokens - fresh - budget, budget, fresh, max(0.0, charged), 0.0)


@dataclass(slots=True)
class Device:
    """All sequences. One step at a time; its results are known at its start and told at its end."""

    costs: DeviceCosts
    num_layers: int
    running: dict[str, Running] = field(default_factory=dict)
    busy_s: float = 0.0
    steps: int = 0

    def run(self, items: Sequence[ev.StepItem]) -> tuple[float, list[ev.ItemResult]]:
        """Seconds of a step, and what it does for everyone in it."""
        work, keys, decode_keys, results = 0, 0.0, 0.0, []
        for item in items:
            sequence = self.running.get(item.request_id)
            if sequence is None:
                continue
            decodes = sequence.current is None
            result, seen = self._go_on(sequence, item)
            work += result.row_layers
            keys, decode_keys = (keys, decode_keys + seen) if decodes else (keys + seen, decode_keys)
            results.append(result)
        seconds = self.costs.seconds(work, keys, decode_keys)
        self.busy_s += seconds
        self.steps += 1
        return seconds, results

    def _go_on(self, sequence: Running, item: ev.StepItem) -> tuple[ev.ItemResult, float]:
        name, layers = sequence.job.request_id, self.num_layers
        if sequence.cancelled:
            return ev.ItemResult(name, "cancelled"), 0.0
        if sequence.current is None:
            sequence.output += 1
            keys = layers * (sequence.plan.layout.num_tokens + sequence.output)
            return ev.ItemResult(name, "sampled", 1, SAMPLED, row_layers=layers), keys
        status, rows, work, seen = sequence.go_on(item.rows_max, item.layers_max)
        sequence.computed += work
        if status == "last_row":
            done = sequence.report()
            if sequence.job.kind == "precompute":
                return ev.ItemResult(name, "prefilled", rows, None, done, row_layers=work), seen
            return ev.ItemResult(name, "sampled", rows, SAMPLED, done, row_layers=work), seen
        return ev.ItemResult(name, "stalled" if status == "stalled" else "running", rows, row_layers=work), seen


SAMPLED = ev.Sampled(7, "x", False)
