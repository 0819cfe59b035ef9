"""Models of the loader with its store and of the blender with its device, for `scheduler_world`.

Each has an inbox and does one thing per call, in whatever order a test calls. What the real actor could not bear
raises AssertionError. `tell` takes what they tell the scheduler.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvblend.actors.core import events as ev
from kvblend.actors.core.limits import Limits
from kvblend.actors.signals import LayerLoaded
from kvblend.engine.layout import BlendPlan
from kvblend.store.keys import ChunkKey

LAYERS = 3
Tell = Callable[[ev.SchedulerEvent], None]


@dataclass
class Load:
    """What the loader holds of one request: leases by segment, and how many layers were handed on."""

    job: ev.Job
    leases: dict[int, ChunkKey] = field(default_factory=dict)
    answered: bool = False
    segments: tuple[int, ...] = ()
    layers: int | None = None
    damaged: bool = False


class ModelLoader:
    """Looks up, loads and writes. `captured` is the side table that it shares with the blender."""

    def __init__(self, chance: random.Random, tell: Tell, captured: set[tuple[str, int]]) -> None:
        self.chance, self.tell, self.captured = chance, tell, captured
        self.inbox: deque[ev.LoaderCommand] = deque()
        self.blender_inbox: deque[ev.BlenderCommand | LayerLoaded] | None = None
        self.loads: dict[str, Load] = {}
        self.writes: list[ev.StoreSegment] = []
        self.stored: set[ChunkKey] = set()
        self.forgotten: set[ChunkKey] = set()
        self.ahead: set[str] = set()
        self.crashed = False

    def take(self) -> bool:
        if not self.inbox:
            return False
        match self.inbox.popleft():
            case ev.LookAhead(job):
                # news of a crash may come behind what was sent to the next loader
                assert self.crashed or job.request_id not in self.ahead, "looked ahead twice"
                self.ahead.add(job.request_id)
            case ev.Lookup(job):
                self.ahead.discard(job.request_id)
                assert job.request_id not in self.loads, "leases of the look-up before were never given back"
                self.loads[job.request_id] = Load(job)
            case ev.StartLoading(name, segments):
                load = self.loads.get(name)
                if load is None:
                    assert self.crashed, f"{name} loads without a look-up"
                    return True
                assert set(segments) <= set(load.leases), "a segment is loaded that was never leased"
                load.segments, load.layers = segments, 0 if segments else None
            case ev.Release(name):
                self.ahead.discard(name)
                self.loads.pop(name, None)
                self.captured -= {key for key in self.captured if key[0] == name}
            case ev.StoreSegment() as command:
                self._take_captured(command)
            case ev.DropChunks(name, segments, _):
                leases = self.loads[name].leases if name in self.loads else {}
                dropped = {leases[index] for index in segments if index in leases}
                self.stored -= dropped
                self.forgotten |= dropped
        return True

    def _take_captured(self, command: ev.StoreSegment) -> None:
        if (command.request_id, command.segment) in self.captured:
            self.captured.discard((command.request_id, command.segment))
            twice = not self.crashed and any(write.key == command.key for write in self.writes)
            assert not twice, "a chunk is computed again while it is written"
            self.writes.append(command)
        else:
            assert self.crashed, "what is to be stored is not there"
            self.tell(ev.Stored(command.request_id, command.key, False, "the captured KV is gone", 0.0))

    def answer(self) -> bool:
        open_ones = [load for load in self.loads.values() if not load.answered]
        if not open_ones:
            return False
        load = self.chance.choice(open_ones)
        load.answered = True
        hits = []
        for index, keys in enumerate(load.job.keys):
            for key, exact in keys.lookup:
                if key in self.stored:
                    load.leases[index] = key
                    hits.append(ev.Hit(index, exact, "disk"))
                    break
        self.tell(ev.LookedUp(load.job.request_id, tuple(hits), 0.0))
        return True

    def _loading(self) -> list[Load]:
        return [v for v in self.loads.values() if v.layers is not None and v.layers < LAYERS and not v.damaged]

    def load_layer(self) -> bool:
        if not (loading := self._loading()):
            return False
        load = self.chance.choice(loading)
        layer = load.layers or 0
        load.layers = layer + 1
        if self.blender_inbox is not None:
            self.blender_inbox.append(LayerLoaded(load.job.request_id, layer))
        return True

    def damage(self) -> None:
        if loading := self._loading():
            load = self.chance.choice(loading)
            load.damaged = True
            bad = load.leases[self.chance.choice(load.segments)]
            self.stored.discard(bad)
            self.forgotten.add(bad)
            self.tell(ev.LoadFailed(load.job.request_id, "flipped bits", 0.0))

    def write(self, error: str = "") -> bool:
        if not self.writes:
            return False
        write = self.writes.pop(self.chance.randrange(len(self.writes)))
        created = not error and write.key not in self.stored
        if not error:
            self.stored.add(write.key)
        self.tell(ev.Stored(write.request_id, write.key, created, error, 0.0))
        return True

    def crash(self) -> None:
        """Everything is lost; the store may still finish what was being written."""
        self.stored |= {write.key for write in self.writes if self.chance.random() < 0.5}
        self.crashed = True
        self.loads.clear()
        self.ahead.clear()
        self.writes.clear()
        self.inbox.clear()

    def start(self) -> None:
        """A new one begins."""
        self.captured.clear()


@dataclass
class Sequence:
    """One sequence of the blender; `layers` are those it has heard of."""

    job: ev.Job
    plan: BlendPlan
    captures: tuple[int, ...]
    pages: int
    needs_layers: bool
    ticks: int
    layers: int = 0
    waits_for_layer: int | None = None
    cancelled: bool = False
    prefilled: bool = False


class ModelBlender:
    """Starts and frees sequences, runs one step at a time; `chance` decides how long prompts take and what they say."""

    def __init__(self, chance: random.Random, tell: Tell, limits: Limits, captured: set[tuple[str, int]]) -> None:
        self.chance, self.tell, self.limits, self.captured = chance, tell, limits, captured
        self.inbox: deque[ev.BlenderCommand | LayerLoaded] = deque()
        self.sequences: dict[str, Sequence] = {}
        self.steps: deque[ev.RunStep] = deque()

    def take(self) -> bool:
        if not self.inbox:
            return False
        match self.inbox.popleft():
            case ev.StartSequence(job, plan, captures):
                self._start(job, plan, captures)
            case ev.FreeSequence(name):
                self.sequences.pop(name, None)
            case ev.FlagCancelled(name):
                if name in self.sequences:
                    self.sequences[name].cancelled = True
            case ev.RunStep() as step:
                self.steps.append(step)
            case LayerLoaded(name, layer):
                self._layer_loaded(name, layer)
        return True

    def _start(self, job: ev.Job, plan: BlendPlan, captures: tuple[int, ...]) -> None:
        name, pages = job.request_id, self.limits.pages_of(job.tokens_max)
        assert name not in self.sequences, f"{name} runs already"
        assert sum(s.pages for s in self.sequences.values()) + pages <= self.limits.pages, "the KV pool is exhausted"
        assert all(job.layout.segments[index].end <= plan.exact_end for index in captures), "approximate KV is kept"
        needs = any(mark != "fresh" for mark in plan.reuse)
        self.sequences[name] = Sequence(job, plan, captures, pages, needs, self.chance.randint(1, 3))

    def _layer_loaded(self, name: str, layer: int) -> None:
        if layer == 0:
            self.tell(ev.FirstLayerLoaded(name, 0.0))
        if (sequence := self.sequences.get(name)) is not None:
            sequence.layers = max(sequence.layers, layer + 1)
            if sequence.waits_for_layer == layer:
                sequence.waits_for_layer = None
                self.tell(ev.Unstalled(name, 0.0))

    def step(self, failing: bool = False) -> bool:
        if not self.steps:
            return False
        step = self.steps.popleft()
        known = [(i, self.sequences[i.request_id]) for i in step.items if i.request_id in self.sequences]
        results = tuple(self._tick(item, sequence, failing) for item, sequence in known)
        self.tell(ev.StepDone(step.number, results, self.chance.choice((0.0, 1.0, 30.0)), 0.0))
        return True

    def _tick(self, item: ev.StepItem, sequence: Sequence, failing: bool) -> ev.ItemResult:
        """What comes of one item; of a prompt any rows up to those asked for, and any layers."""
        result = self._go_on(sequence, failing)
        if not result.rows or (sequence.job.kind == "generate" and sequence.prefilled and result.prefill is None):
            return result
        rows = self.chance.randint(1, item.rows_max)
        layers = self.chance.randint(0 if result.status == "stalled" else 1, item.layers_max or LAYERS)
        return replace(result, rows=rows, row_layers=rows * layers)

    def _go_on(self, sequence: Sequence, failing: bool) -> ev.ItemResult:
        name = sequence.job.request_id
        if sequence.cancelled:
            return ev.ItemResult(name, "cancelled")
        if sequence.needs_layers and sequence.layers < min(LAYERS, 4 - sequence.ticks):
            sequence.waits_for_layer = sequence.layers
            return ev.ItemResult(name, "stalled", 1)
        if failing and self.chance.random() < 0.5:
            return ev.ItemResult(name, "failed", error="logits are NaN")
        report = None
        if not sequence.prefilled:
            if sequence.ticks > 1:
                sequence.ticks -= 1
                return ev.ItemResult(name, "running", 1)
            sequence.prefilled = True
            self.captured |= {(name, segment) for segment in sequence.captures}
            report = ev.PrefillReport(0, 0, sequence.job.layout.num_tokens, 1.0, 0.0)
        if sequence.job.kind == "precompute":
            return ev.ItemResult(name, "prefilled", 1, None, report)
        sampled = ev.Sampled(7, self.chance.choice(("", "x")), self.chance.random() < 0.3)
        return ev.ItemResult(name, "sampled", 1, sampled, report)

    def crash(self) -> None:
        """Everything is lost, but what was captured waits for the loader."""
        self.sequences.clear()
        self.steps.clear()
        self.inbox.clear()
