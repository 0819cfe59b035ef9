"""The simulated server: the scheduler's real core, model device and model loader, and a queue of what happens when."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvblend.actors.core import events as ev
from kvblend.actors.core.limits import Limits
from kvblend.actors.core.scheduler import SchedulerState
from kvblend.actors.messages import Failed, Finished
from simulation.device import Device, DeviceCosts, Running
from simulation.disk import DiskCosts, ModelStore
from simulation.loader import ModelLoader
from simulation.workload import SYSTEM, Workload


@dataclass(frozen=True, slots=True)
class Ended:
    """One request: when it arrived and ended, whether it had a deadline, and its terminal event.

    Without one it was refused before it was accepted.
    """

    arrived_s: float
    ended_s: float
    bound: bool
    terminal: Finished | Failed | None


@dataclass(slots=True)
class Outcome:
    """All requests' ends, and what device and store did. `events` were handled in `cpu_s` seconds of processor time."""

    ended: list[Ended] = field(default_factory=list)
    events: int = 0
    cpu_s: float = 0.0
    simulated_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    bytes_read: int = 0


class World:
    """One run. `queue_max` requests are taken at a time, like `queue_requests_max` of a server."""

    def __init__(
        self, limits: Limits, workload: Workload, device: DeviceCosts, disk: DiskCosts, queue_max: int = 256
    ) -> None:
        self.limits, self.workload, self.queue_max = limits, workload, queue_max
        # nobody asks for the story of a simulated request
        self.state = SchedulerState(limits, itertools.count(1).__next__, story_length=2)
        self.device = Device(device, limits.num_layers)
        self.store = ModelStore(disk, limits.num_layers, limits.layer_token_bytes)
        self.loader = ModelLoader(self.store, 4, self.later, self.tell, self._delivered, self._taken)
        self.out = Outcome()
        self.now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._arrived: dict[str, tuple[float, bool]] = {}

    def store_all(self, *, in_memory: bool = False) -> None:
        """Every chunk of the pool and the system prompt are stored beforehand."""
        for keys, tokens in self.workload.chunk_layouts():
            for key, count in ((keys[0].keep, len(SYSTEM)), (keys[1].keep, tokens), (keys[1].precompute, tokens)):
                if key is not None:
                    self.store.keep(key, count, in_memory=in_memory)

    def later(self, at_s: float, what: Callable[[float], None]) -> None:
        """Have `what` called at a time; of equal times the one that was said first comes first."""
        heapq.heappush(self._agenda, (at_s, next(self._numbers), what))

    def run(self) -> Outcome:
        """Until every request has ended."""
        began = time.process_time()
        arrivals = zip(self.workload.arrivals(), self.workload.jobs(), strict=True)
        self._next_arrival(arrivals)
        while self._agenda:
            self.now_s, _, what = heapq.heappop(self._agenda)
            what(self.now_s)
        out = self.out
        out.cpu_s, out.simulated_s = time.process_time() - began, self.now_s
        out.busy_s, out.steps = self.device.busy_s, self.device.steps
        out.bytes_read = self.store.bytes_read
        return out

    def _next_arrival(self, arrivals: zip[tuple[float, ev.Job]]) -> None:
        coming = next(arrivals, None)
        if coming is not None:
            at_s, job = coming
            self.later(at_s, lambda now: self._arrive(job, now, arrivals))

    def _arrive(self, job: ev.Job, at_s: float, arrivals: zip[tuple[float, ev.Job]]) -> None:
        self._next_arrival(arrivals)
        if len(self._arrived) >= self.queue_max:
            self.out.ended.append(Ended(at_s, at_s, job.deadline_ms is not None, None))
            return
        self._arrived[job.request_id] = at_s, job.deadline_ms is not None
        if job.deadline_ms is not None:
            name = job.request_id
            self.later(at_s + job.deadline_ms / 1e3, lambda now: self._late(name, now))
        self.tell(ev.Submitted(job, at_s))

    def _late(self, name: str, at_s: float) -> None:
        if name in self._arrived:
            self.tell(ev.CancelRequested(name, "the deadline has passed", at_s, deadline=True))

    def tell(self, event: ev.SchedulerEvent) -> None:
        """Hand one event to the core and carry its commands out."""
        self.out.events += 1
        for command in self.state.handle(event):
            self._perform(command, event.at_s)

    def _perform(self, command: ev.SchedulerCommand, at_s: float) -> None:
        match command:
            case ev.Emit(name, event):
                if isinstance(event, Finished | Failed) and name in self._arrived:
                    arrived_s, bound = self._arrived.pop(name)
                    self.out.ended.append(Ended(arrived_s, at_s, bound, event))
            case ev.StartSequence(job, _, _):
                self.device.running[job.request_id] = Running.start(command, self.limits.num_layers)
            case ev.RunStep(number, items):
                seconds, results = self.device.run(items)
                self.later(at_s + seconds, lambda now: self._step_done(number, results, seconds, now))
            case ev.FlagCancelled(name):
                if name in self.device.running:
                    self.device.running[name].cancelled = True
            case ev.FreeSequence(name):
                self.device.running.pop(name, None)
            case _:
                self.loader.perform(command, at_s)

    def _step_done(self, number: int, results: list[ev.ItemResult], seconds: float, at_s: float) -> None:
        told = []
        for result in results:
            sequence = self.device.running.get(result.request_id)
            if result.status == "stalled" and sequence is not None and sequence.waits_for is None:
                # the layer came while the device was busy
                result = replace(result, status="running")
            told.append(result)
        self.tell(ev.StepDone(number, tuple(told), 1e3 * seconds, at_s))

    def _delivered(self, name: str, layer: int, at_s: float) -> None:
        sequence = self.device.running.get(name)
        if sequence is None:
            return
        sequence.loaded = max(sequence.loaded, layer + 1)
        if layer == 0:
            self.tell_soon(ev.FirstLayerLoaded(name, at_s))
        if sequence.waits_for is not None and sequence.waits_for <= layer:
            sequence.waits_for = None
            entry = self.state.entries.get(name)
            if entry is not None and entry.stalled:
                self.tell_soon(ev.Unstalled(name, at_s))

    def tell_soon(self, event: ev.SchedulerEvent) -> None:
        """Behind the commands that are being carried out: the core handles one event at a time."""
        self.later(event.at_s, lambda _: self.tell(event))

    def _taken(self, name: str) -> int:
        sequence = self.device.running.get(name)
        return sequence.taken if sequence is not None else 0
