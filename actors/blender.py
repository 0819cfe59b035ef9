"""The blender: owns the device thread's work. Starts and frees sequences, runs one step at a time."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvblend.actors.core import events as ev
from kvblend.actors.runtime.actor import Actor, ActorDied, ActorRef
from kvblend.actors.runtime.device_thread import DeviceClosed, DeviceThread
from kvblend.actors.signals import BlenderMessage, LayerLoaded, Reset, SchedulerMessage
from kvblend.actors.specs import SpecBuilder
from kvblend.actors.tables import Captured, RequestLayers, SideTables
from kvblend.engine.precision import UnstorableKV
from kvblend.engine.runner import Runner, TickResult

T = TypeVar("T")
log = logging.getLogger("kvblend.blender")


@dataclass(frozen=True, slots=True)
class TickReport:
    """What came back from the device thread: results, captured payloads, milliseconds."""

    results: list[TickResult]
    captured: dict[tuple[str, int], Captured]
    compute_ms: float


class Blender(Actor[BlenderMessage]):
    """Never waits for the device in `handle`: layers keep arriving and cancels take effect while a step runs."""

    def __init__(
        self,
        runner: Runner,
        device: DeviceThread,
        specs: SpecBuilder,
        tables: SideTables,
        scheduler: ActorRef[SchedulerMessage],
    ) -> None:
        self._runner = runner
        self._device = device
        self._specs = specs
        self._tables = tables
        self._scheduler = scheduler
        self._started: dict[str, RequestLayers] = {}
        self._captures: dict[str, tuple[int, ...]] = {}
        self._stalled: dict[str, int] = {}
        # starts and frees that go to the device with the next job, in order
        self._orders: list[Callable[[], None]] = []
        self._orders_sent = False

    async def handle(self, message: BlenderMessage) -> None:
        """Perform one command, or take note of a loaded layer."""
        match message:
            case LayerLoaded(request_id, layer):
                self._layer_loaded(request_id, layer)
            case ev.StartSequence(job, plan, captures, continues):
                layers = self._tables.open_layers(job.request_id)
                spec = replace(self._specs.build(job, plan, captures, layers), continues=continues)
                self._started[job.request_id] = layers
                self._captures[job.request_id] = captures
                self._order(functools.partial(self._runner.start, spec))
            case ev.RunStep(number, items):
                due = [(item.request_id, item.rows_max, item.layers_max) for item in items]
                wanted = {name: self._captures.get(name, ()) for name, _, _ in due}
                running = self._device.submit(run_tick, self._runner, self._take_orders(), due, wanted)
                self.spawn(self._step(number, running), f"step {number}")
            case ev.FlagCancelled(request_id):
                self._runner.flag_cancelled(request_id)
            case ev.FreeSequence(request_id):
                self._free(request_id)
            case Reset():
                for request_id in self._started:
                    self._tables.drop_captured(request_id)
                await self.stop()
            case _:
                await super().handle(message)

    async def stop(self) -> None:
        """Free every sequence behind whatever the device is doing."""
        for request_id in list(self._started):
            self._runner.flag_cancelled(request_id)
            self._forget(request_id)
        if self._orders:
            self._device.submit(run_orders, self._take_orders()).add_done_callback(_look_at)

    def _free(self, request_id: str) -> None:
        if self._forget(request_id):
            self._send_orders()

    def _forget(self, request_id: str) -> bool:
        """Drop what is known of a sequence and queue its release; False where it was not started."""
        self._captures.pop(request_id, None)
        self._stalled.pop(request_id, None)
        layers = self._started.pop(request_id, None)
        if layers is not None:
            # only its own: the loader may have opened new ones for the next try of this job already
            if self._tables.layers.get(request_id) is layers:
                self._tables.close_layers(request_id)
            self._orders.append(functools.partial(self._runner.free, request_id))
        return layers is not None

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._send_orders()

    def _send_orders(self) -> None:
        """One job for all starts and frees that pile up behind a step, however many: the device's queue is bounded."""
        if not self._orders_sent:
            self._orders_sent = True
            self.spawn(self._await_orders(self._device.submit(run_orders, self._take_orders())), "orders")

    def _take_orders(self) -> list[Callable[[], None]]:
        taken, self._orders = self._orders, []
        return taken

    async def _await_orders(self, done: asyncio.Future[None]) -> None:
        await _whatever_happens(done)
        self._orders_sent = False
        if self._orders:
            self._send_orders()

    def _layer_loaded(self, request_id: str, layer: int) -> None:
        if layer == 0:
            self._tell(ev.FirstLayerLoaded(request_id, time.monotonic()))
        if self._stalled.get(request_id) == layer:
            del self._stalled[request_id]
            self._tell(ev.Unstalled(request_id, time.monotonic()))

    async def _step(self, number: int, running: asyncio.Future[TickReport]) -> None:
        report = await _whatever_happens(running)
        # of a sequence that was freed meanwhile nobody will ask for anything
        kept = {key: payloads for key, payloads in report.captured.items() if key[0] in self._started}
        self._tables.captured.update(kept)
        results = tuple(self._translate(result) for result in report.results)
        self._tell(ev.StepDone(number, results, report.compute_ms, time.monotonic()))

    def _translate(self, result: TickResult) -> ev.ItemResult:
        name, status = result.request_id, result.status
        layers = self._tables.layers.get(name)
        if status == "stalled":
            # the layer may have come while the device was busy with others
            if layers is not None and result.layer in layers.arrived:
                status = "running"
            else:
                self._stalled[name] = result.layer
        prefill = None
        if result.figures is not None:
            f = result.figures
            load_ms = layers.load_ms if layers is not None else 0.0
            prefill = ev.PrefillReport(
                f.tokens_reused,
                f.tokens_recomputed,
                f.tokens_fresh,
                f.charged_ratio,
                f.parity_error,
                load_ms,
                f.recompute_ratio,
                f.kl_estimate,
                f.ratios_tried,
            )
        sampled = None
        if status == "sampled":
            sampled = ev.Sampled(result.token_id, result.text, result.stopped, result.logprob)
        return ev.ItemResult(name, status, result.rows, sampled, prefill, result.error, result.row_layers)

    def _tell(self, event: ev.SchedulerEvent) -> None:
        try:
            self._scheduler.tell_nowait(event, "system")
        except ActorDied:
            log.debug("the scheduler is not there to hear of %s", type(event).__name__)


def run_orders(orders: list[Callable[[], None]]) -> None:
    """Starts and frees in order, in the device thread. The first error is raised when all have been carried out."""
    first: Exception | None = None
    for order in orders:
        try:
            order()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def run_tick(
    runner: Runner,
    orders: list[Callable[[], None]],
    items: list[tuple[str, int, int | None]],
    captures: dict[str, tuple[int, ...]],
) -> TickReport:
    """One tick, in the device thread, behind the starts and frees that were ordered before it."""
    run_orders(orders)
    began = time.perf_counter()
    results = runner.tick(items)
    captured = {
        (result.request_id, segment): capture_of(runner, result.request_id, segment)
        for result in results
        if result.figures is not None
        for segment in captures[result.request_id]
    }
    return TickReport(results, captured, 1e3 * (time.perf_counter() - began))


def capture_of(runner: Runner, request_id: str, segment: int) -> Captured:
    """What was captured, in its stored form, or why it has none: nobody else's step must fail for that."""
    try:
        return runner.payloads(request_id, segment)
    except UnstorableKV as error:
        log.warning("segment %d of %s is not stored: %s", segment, request_id, error)
        return str(error)


async def _whatever_happens(job: asyncio.Future[T]) -> T:
    """Wait for a job that must run though its waiter is cancelled: with it frees would be lost."""
    job.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(job)


def _look_at(freed: asyncio.Future[None]) -> None:
    """A device that is closed frees everything anyway; any other error must be seen."""
    error = None if freed.cancelled() else freed.exception()
    if error is not None and not isinstance(error, DeviceClosed):
        log.error("KV slots could not be freed", exc_info=error)
