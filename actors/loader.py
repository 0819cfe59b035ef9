"""The loader: leases chunks, reads their layers ahead of the compute, writes captured chunks."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from kvblend.actors.core import events as ev
from kvblend.actors.core.loading import CloseLoad, DeliverLayer, LoadCommand, LoadingState, ReadLayer
from kvblend.actors.runtime.actor import Actor, ActorDied, ActorRef
from kvblend.actors.runtime.mailbox import MailboxClosed
from kvblend.actors.signals import BlenderMessage, LayerLoaded, LoaderMessage, Reset, SchedulerMessage
from kvblend.actors.tables import RequestLayers, SideTables
from kvblend.store.errors import ChunkDamaged, StoreError
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

log = logging.getLogger("kvblend.loader")


@dataclass(slots=True, eq=False)
class Load:
    """One request's leases, by segment, and where its layers go. `open` False: whatever comes back is dropped."""

    name: str
    job: ev.Job
    leases: dict[int, ChunkLease] = field(default_factory=dict)
    segments: tuple[int, ...] = ()
    layers: RequestLayers | None = None
    open: bool = True

    def close_leases(self) -> None:
        """Give all leases back."""
        for lease in self.leases.values():
            lease.release()
        self.leases.clear()


class Loader(Actor[LoaderMessage]):
    """Shell around `LoadingState`; the store is its only effect, and the blender hears of every layer."""

    def __init__(
        self,
        store: ChunkStore,
        tables: SideTables,
        scheduler: ActorRef[SchedulerMessage],
        blender: ActorRef[BlenderMessage],
        window: int,
    ) -> None:
        self._store = store
        self._tables = tables
        self._scheduler = scheduler
        self._blender = blender
        self._state = LoadingState(store.shape.num_layers, window)
        self._loads: dict[str, Load] = {}
        self._by_name: dict[str, Load] = {}
        self._count = 0

    async def start(self) -> None:
        """Forget captures whose command was lost with a loader before this one."""
        self._tables.captured.clear()

    async def handle(self, message: LoaderMessage) -> None:
        """Perform one command of the scheduler."""
        match message:
            case ev.Lookup(job):
                self._count += 1
                load = Load(f"{job.request_id}#{self._count}", job)
                self._loads[job.request_id] = load
                self.spawn(self._look_up(load), f"look up {job.request_id}")
            case ev.StartLoading(request_id, segments):
                self._start(request_id, segments)
            case ev.Release(request_id):
                self._release(request_id)
            case ev.StoreSegment():
                # taken now: the release behind this command drops what nobody has asked for
                payloads = self._tables.captured.pop((message.request_id, message.segment), None)
                self.spawn(self._write(message, payloads), f"store {message.request_id}/{message.segment}")
            case ev.DropChunks(request_id, segments, reason):
                self._drop(request_id, segments, reason)
            case Reset():
                for request_id in list(self._loads):
                    self._release(request_id)
            case _:
                await super().handle(message)

    def _drop(self, request_id: str, segments: tuple[int, ...], reason: str) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return
        for index in segments:
            if index in load.leases:
                chunk_id = load.leases[index].key.id
                log.warning("chunk %s is dropped: %s", chunk_id, reason)
                self.spawn(self._delete(chunk_id), f"drop {chunk_id[:12]}")

    async def _delete(self, chunk_id: str) -> None:
        await self._store.delete(chunk_id)

    async def stop(self) -> None:
        """Give every lease back."""
        for load in [*self._loads.values(), *self._by_name.values()]:
            load.open = False
            load.close_leases()
            self._tables.close_layers(load.job.request_id)

    async def _look_up(self, load: Load) -> None:
        hits: list[ev.Hit] = []
        try:
            for index, keys in enumerate(load.job.keys):
                ids = load.job.layout.segments[index].token_ids
                for key, exact in keys.lookup:
                    lease = await self._store.lease(key, ids)
                    if lease is not None:
                        load.leases[index] = lease
                        hits.append(ev.Hit(index, exact, lease.tier))
                        break
                if not load.open:
                    return
        finally:
            if not load.open:
                load.close_leases()
        self._tell(ev.LookedUp(load.job.request_id, tuple(hits), time.monotonic()))

    def _start(self, request_id: str, segments: tuple[int, ...]) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return
        for index in set(load.leases) - set(segments):
            load.leases.pop(index).release()
        if not segments:
            return
        load.segments = segments
        load.layers = self._tables.open_layers(request_id)
        load.layers.started_s = time.monotonic()
        self._by_name[load.name] = load
        self._perform(self._state.start(load.name))

    def _release(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        self._tables.close_layers(request_id)
        self._tables.drop_captured(request_id)
        if load is None:
            return
        load.open = False
        if load.name in self._by_name:
            self._perform(self._state.close(load.name))
        else:
            load.close_leases()

    def _perform(self, commands: list[LoadCommand]) -> list[DeliverLayer]:
        """Start reads and close loads; deliveries are returned, for the reader that caused them to make."""
        deliveries = []
        for command in commands:
            load = self._by_name[command.request_id]
            match command:
                case ReadLayer(_, layer):
                    self.spawn(self._read(load, layer), f"read {load.name} layer {layer}")
                case CloseLoad():
                    load.close_leases()
                    del self._by_name[load.name]
                case DeliverLayer():
                    deliveries.append(command)
        return deliveries

    async def _read(self, load: Load, layer: int) -> None:
        """Bring one layer of every segment to host memory, then hand on all layers that are next in order."""
        try:
            waits = [load.leases[i].layer(layer) for i in load.segments if load.leases[i].layer_nowait(layer) is None]
            if waits:
                await _all_or_first_error(waits)
        except ChunkDamaged as error:
            if load.open:
                load.open = False
                self._tell(ev.LoadFailed(load.job.request_id, error.reason, time.monotonic()))
        for delivery in self._perform(self._state.layer_read(load.name, layer)):
            if load.open and load.layers is not None:
                await self._deliver(load, load.layers, delivery.layer)

    async def _deliver(self, load: Load, layers: RequestLayers, layer: int) -> None:
        starts = load.job.layout.segments
        parts = [(starts[index].start, load.leases[index].layer_nowait(layer)) for index in load.segments]
        layers.put(layer, [(start, view) for start, view in parts if view is not None])
        try:
            await self._blender.tell(LayerLoaded(load.job.request_id, layer))
        except MailboxClosed:
            log.debug("the blender is not there to hear of layer %d of %s", layer, load.job.request_id)

    async def _write(self, command: ev.StoreSegment, payloads: list[memoryview] | None) -> None:
        created, error = False, ""
        if payloads is None:
            error = "the captured KV is gone"
        else:
            try:
                if command.replace:
                    await self._store.delete(command.key.id)
                created = await self._store.put(command.key, command.token_ids, payloads)
            except StoreError as problem:
                error = f"not stored: {problem}"
                log.warning("chunk %s of request %s was %s", command.key.id[:16], command.request_id, error)
        self._tell(ev.Stored(command.request_id, command.key, created, error, time.monotonic()))

    def _tell(self, event: ev.SchedulerEvent) -> None:
        try:
            self._scheduler.tell_nowait(event, "system")
        except ActorDied:
            log.debug("the scheduler is not there to hear of %s", type(event).__name__)


async def _all_or_first_error(waits: list[asyncio.Future[memoryview]] | list) -> None:  # type: ignore[type-arg]
    """Await all; the first error is raised once every one has come back, so that no read is left behind."""
    for result in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
