"""A world in which computing takes modelled time: one `SchedulerState`, a device that cuts prompts as the engine does.

Nothing fails here and nothing is random; `scheduler_world` is for that. Milliseconds everywhere but in events.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from kvblend.actors.core import events as ev
from kvblend.actors.core.limits import Limits
from kvblend.actors.core.scheduler import SchedulerState
from kvblend.actors.messages import Delta, Failed, Finished
from kvblend.engine.layout import BlendPlan, Reuse


@dataclass
class Model:
    """What things take: a decode step, each row of it, a row-layer at position 0; at `far` tokens twice as much."""

    num_layers: int = 10
    decode_ms: float = 10.0
    decode_row_ms: float = 1.0
    row_layer_ms: float = 0.01
    far: int = 1 << 40
    load_ms: float = 5.0
    write_ms: float = 20.0


@dataclass
class Prompt:
    """One sequence: `passes` are (first layer, stop, rows); a slice of the first of them may be on its way."""

    job: ev.Job
    passes: list[tuple[int, int, int]]
    begun: int = 0
    rows: int = 0
    layer: int = 0
    done: int = 0
    position: float = 0.0

    @classmethod
    def of(cls, job: ev.Job, plan: BlendPlan, num_layers: int) -> Prompt:
        fresh, cached = plan.count(Reuse.FRESH), plan.count(Reuse.CACHED)
        full = job.shape.full_layers
        blend = [(0, full, fresh + cached), (full, num_layers, fresh + plan.budget)]
        passes = blend if cached else [(0, num_layers, fresh)]
        return cls(job, passes)

    def go_on(self, rows_max: int, layers_max: int | None) -> tuple[int, int]:
        """(rows, row-layers) of one sweep."""
        layers = 1 << 20 if layers_max is None else layers_max
        if not self.rows:
            self._open(rows_max)
        first, count, self.position = self.rows, 0, self.begun - self.rows / 2
        while layers:
            count += self.rows
            self.layer += 1
            layers -= 1
            _, stop, rows = self.passes[0]
            if self.layer < stop:
                continue
            self.rows = 0
            if self.begun < rows:
                break
            self.passes.pop(0)
            self.begun = 0
            if not self.passes or self.passes[0][0] == 0:
                break
            self._open(rows_max)
        self.done += count
        return first, count

    def _open(self, rows_max: int) -> None:
        start, _, rows = self.passes[0]
        self.rows, self.layer = min(rows_max, rows - self.begun), start
        self.begun += self.rows


@dataclass
class StepTime:
    """One step: when it began, how long it took, its decoding rows, and the row-layers of its prefills by request."""

    at_ms: float
    ms: float
    decoding: int
    work: dict[str, int]


@dataclass
class TimedWorld:
    """`cached` chunks are in the store already. Times of tokens and ends stand in `tokens_ms` and `ends`."""

    limits: Limits
    model: Model = field(default_factory=Model)
    cached: bool = False

    def __post_init__(self) -> None:
        self.state = SchedulerState(self.limits, itertools.count(1).__next__)
        self.now_ms = 0.0
        self.steps: list[StepTime] = []
        self.tokens_ms: dict[str, list[float]] = {}
        self.ends: dict[str, Finished | Failed] = {}
        self.ends_ms: dict[str, float] = {}
        self.admitted: list[str] = []
        self.prompts: dict[str, Prompt] = {}
        self._queue: list[tuple[float, int, ev.SchedulerEvent]] = []
        self._count = itertools.count()

    def submit(self, job: ev.Job, at_ms: float = 0.0) -> None:
        self._later(at_ms, ev.Submitted(job, at_ms / 1e3))
        if job.deadline_ms is not None:
            end_ms = at_ms + job.deadline_ms
            self._later(end_ms, ev.CancelRequested(job.request_id, "too late", end_ms / 1e3, True))

    def run(self, until_ms: float = float("inf")) -> None:
        """Go on until nothing is left to happen."""
        while self._queue and self._queue[0][0] <= until_ms:
            self.now_ms, _, event = heapq.heappop(self._queue)
            for command in self.state.handle(event):
                self._perform(command)
            self.state.validate()

    def itl_ms(self, name: str) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.tokens_ms[name])]

    def ttft_ms(self, name: str, since_ms: float = 0.0) -> float:
        return self.tokens_ms[name][0] - since_ms

    def _later(self, at_ms: float, event: ev.SchedulerEvent) -> None:
        heapq.heappush(self._queue, (at_ms, next(self._count), event))

    def _perform(self, command: ev.SchedulerCommand) -> None:
        now_s = self.now_ms / 1e3
        match command:
            case ev.Lookup(job):
                self.admitted.append(job.request_id)
                last = len(job.keys) - (1 if job.kind == "precompute" else 0)
                found = [i for i, keys in enumerate(job.keys[:last]) if keys.lookup and self.cached]
                hits = tuple(ev.Hit(i, job.keys[i].lookup[0][1] and i == 0, "disk") for i in found)
                self._later(self.now_ms, ev.LookedUp(job.request_id, hits, now_s))
            case ev.StartSequence(job, plan, _):
                self.prompts[job.request_id] = Prompt.of(job, plan, self.model.num_layers)
            case ev.StartLoading(name, segments) if segments:
                at_ms = self.now_ms + self.model.load_ms
                self._later(at_ms, ev.FirstLayerLoaded(name, at_ms / 1e3))
            case ev.StoreSegment(name, _, key):
                at_ms = self.now_ms + self.model.write_ms
                self._later(at_ms, ev.Stored(name, key, True, "", at_ms / 1e3))
            case ev.RunStep(number, items):
                self._step(number, items)
            case ev.Emit(name, event):
                if isinstance(event, Delta):
                    self.tokens_ms.setdefault(name, []).append(self.now_ms)
                elif isinstance(event, Finished | Failed):
                    assert name not in self.ends, f"{name} ends twice"
                    self.ends[name], self.ends_ms[name] = event, self.now_ms
            case _:
                pass

    def _step(self, number: int, items: tuple[ev.StepItem, ...]) -> None:
        model, results, decoding, work, ms = self.model, list[ev.ItemResult](), 0, dict[str, int](), 0.0
        for item in items:
            name, prompt = item.request_id, self.prompts[item.request_id]
            if not prompt.passes:
                decoding += 1
                results.append(
                    ev.ItemResult(name, "sampled", 1, ev.Sampled(5, "x", False), row_layers=model.num_layers)
                )
                continue
            rows, count = prompt.go_on(item.rows_max, item.layers_max)
            ms += count * model.row_layer_ms * (1.0 + prompt.position / model.far)
            work[name] = count
            if prompt.passes:
                results.append(ev.ItemResult(name, "running", rows, row_layers=count))
                continue
            report = ev.PrefillReport(0, 0, prompt.job.layout.num_tokens, 1.0, 0.0)
            if prompt.job.kind == "precompute":
                results.append(ev.ItemResult(name, "prefilled", rows, None, report, row_layers=count))
            else:
                token = ev.Sampled(5, "x", False)
                results.append(ev.ItemResult(name, "sampled", rows, token, report, row_layers=count))
        ms += (model.decode_ms + decoding * model.decode_row_ms) if decoding else 0.0
        self.steps.append(StepTime(self.now_ms, ms, decoding, work))
        at_ms = self.now_ms + ms
        self._later(at_ms, ev.StepDone(number, tuple(results), ms, at_ms / 1e3))
