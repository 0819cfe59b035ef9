"""The loader: leases chunks, reads their layers ahead of the compute, writes captured chunks."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import defaultdict
from contextlib import aclosing

from kvblend.actors.core import events as ev
from kvblend.actors.core.loading import DeliverLayer, LoadCommand, LoadingState, Rank, ReadRun
from kvblend.actors.core.speeds import TierMeter, TierSpeed
from kvblend.actors.device_pool import DevicePool
from kvblend.actors.loads import Load, lease_segments
from kvblend.actors.runtime.actor import Actor, ActorDied, ActorRef
from kvblend.actors.runtime.mailbox import MailboxClosed
from kvblend.actors.signals import BlenderMessage, LayerLoaded, LoaderMessage, Reset, SchedulerMessage
from kvblend.actors.tables import Captured, SideTables
from kvblend.store.errors import ChunkDamaged, StoreError
from kvblend.store.lease import ChunkLease, prefetch_all
from kvblend.store.store import ChunkStore
from kvblend.store.tiers import Tier

log = logging.getLogger("kvblend.loader")
LOOKAHEAD_LAYERS = 2
TIERS: dict[str, Tier] = {"host": "host", "disk": "disk", "remote": "remote"}


class Loader(Actor[LoaderMessage]):
    """Shell around `LoadingState`; store and device pool are its only effects, and the blender hears of every layer.

    `window` bounds the reads in flight of all requests together. Leases of requests that are looked ahead hold at most
    `ahead_bytes_max` bytes. At the start it reads from each lower tier for `probe_s` seconds, to learn its speed.
    """

    def __init__(
        self,
        store: ChunkStore,
        tables: SideTables,
        scheduler: ActorRef[SchedulerMessage],
        blender: ActorRef[BlenderMessage],
        window: int,
        ahead_bytes_max: int = 1 << 30,
        probe_s: float = 0.0,
        pool: DevicePool | None = None,
    ) -> None:
        self._store = store
        self._pool = pool
        self._tables = tables
        self._scheduler = scheduler
        self._blender = blender
        self._ahead_bytes_max = ahead_bytes_max
        self._probe_s = probe_s
        self._state = LoadingState(store.shape.num_layers, window)
        # of admitted requests; of those that are looked ahead; and all that the core knows, by the load's name
        self._loads: dict[str, Load] = {}
        self._ahead: dict[str, Load] = {}
        self._by_name: dict[str, Load] = {}
        self._numbers = itertools.count(1)
        self._meters: dict[str, TierMeter] = defaultdict(TierMeter)

    async def start(self) -> None:
        """Forget captures whose command was lost with a loader before this one."""
        self._tables.captured.clear()
        if self._probe_s:
            self.spawn(self._probe(), "probe")

    async def handle(self, message: LoaderMessage) -> None:
        """Perform one command of the scheduler."""
        match message:
            case ev.Lookup(job, deadline_s):
                load = self._loads[job.request_id] = self._new_load(job, deadline_s)
                self._take_over(self._ahead.pop(job.request_id, None), load)
                self.spawn(self._look_up(load), f"look up {job.request_id}")
            case ev.LookAhead(job, deadline_s):
                self._close(self._ahead.pop(job.request_id, None))
                load = self._ahead[job.request_id] = self._new_load(job, deadline_s)
                self.spawn(self._look_ahead(load), f"look ahead {job.request_id}")
            case ev.StartLoading(request_id, segments):
                await self._start(request_id, segments)
            case ev.Release(request_id):
                self._release(request_id)
            case ev.StoreSegment():
                # taken now: the release behind this command drops what nobody has asked for
                payloads = self._tables.captured.pop((message.request_id, message.segment), None)
                self.spawn(self._write(message, payloads), f"store {message.request_id}/{message.segment}")
            case ev.DropChunks(request_id, segments, reason):
                self._drop(request_id, segments, reason)
            case Reset():
                for request_id in {**self._loads, **self._ahead}:
                    self._release(request_id)
            case _:
                await super().handle(message)

    async def stop(self) -> None:
        """Give every lease back."""
        for load in [*self._loads.values(), *self._ahead.values()]:
            load.open = False
            load.close_leases()
            self._tables.close_layers(load.job.request_id)

    def speeds(self) -> dict[str, TierSpeed]:
        """What is known of each tier."""
        return {tier: meter.speed for tier, meter in self._meters.items() if meter.speed is not None}

    async def _probe(self) -> None:
        """Learn each tier's speed from chunks that are there, so that the first requests are decided on as well."""
        async with aclosing(self._store.probe(self._probe_s)) as readings:
            async for reading in readings:
                meter = self._meters[reading.tier]
                meter.note_latency(reading.latency_s)
                meter.begin(reading.began_s)
                meter.end(reading.num_bytes, reading.ended_s)

    def _new_load(self, job: ev.Job, deadline_s: float) -> Load:
        number = next(self._numbers)
        return Load(f"{job.request_id}#{number}", job, Rank(deadline_s, number))

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

    # ---- look-ups ----

    async def _look_up(self, load: Load) -> None:
        try:
            hits = await lease_segments(load, self._store, lambda _: True, self._note_lease, pool=self._pool)
        finally:
            if not load.open:
                load.close_leases()
        if load.open:
            self._tell(ev.LookedUp(load.job.request_id, tuple(hits), time.monotonic(), self.speeds()))

    async def _look_ahead(self, load: Load) -> None:
        """Lease what is stored and fits the budget, and have its first layers read when nobody else reads."""
        try:
            fits = functools.partial(self._fits_ahead, load)
            await lease_segments(load, self._store, fits, self._note_lease, 1, self._pool)
        finally:
            if not load.open:
                load.close_leases()
        if load.open:
            load.segments = tuple(load.leases)
            self._by_name[load.name] = load
            missing = load.missing(self._store.shape.num_layers)
            self._perform(self._state.open(load.name, missing, load.rank, LOOKAHEAD_LAYERS))

    def _fits_ahead(self, load: Load, index: int) -> bool:
        shape = self._store.shape
        leases = [lease for other in self._ahead.values() for lease in other.leases.values()]
        # what lies on the device takes no host memory
        layers = [lease.layer_bytes for lease in leases if isinstance(lease, ChunkLease)]
        layers.append(shape.layer_bytes(len(load.job.layout.segments[index].token_ids)))
        return shape.num_layers * sum(layers) <= self._ahead_bytes_max

    def _take_over(self, ahead: Load | None, load: Load) -> None:
        """What was leased ahead goes to the request's own load."""
        if ahead is not None:
            load.leases, ahead.leases = ahead.leases, {}
            self._close(ahead)

    def _note_lease(self, lease: ChunkLease, seconds: float) -> None:
        if lease.tier != "host":
            self._meters[lease.tier].note_latency(seconds)

    # ---- loading ----

    async def _start(self, request_id: str, segments: tuple[int, ...]) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return
        for index in set(load.leases) - set(segments):
            load.leases.pop(index).release()
        if not segments:
            return
        if self._pool is not None:
            load.leases = {index: self._pool.admit(lease) for index, lease in load.leases.items()}
        load.segments = segments
        load.layers = self._tables.open_layers(request_id)
        load.layers.started_s = time.monotonic()
        self._by_name[load.name] = load
        self._perform(self._state.open(load.name, load.missing(self._store.shape.num_layers), load.rank))
        await self._tell_layers(load)

    def _release(self, request_id: str) -> None:
        self._close(self._loads.pop(request_id, None))
        self._close(self._ahead.pop(request_id, None))
        self._tables.close_layers(request_id)
        self._tables.drop_captured(request_id)

    def _close(self, load: Load | None) -> None:
        """End a load: its queued reads never start, and nobody waits for those in flight."""
        if load is None:
            return
        load.open = False
        if self._by_name.pop(load.name, None) is not None:
            self._perform(self._state.close(load.name))
        load.close_leases()

    def _perform(self, commands: list[LoadCommand]) -> None:
        """Start reads, and put complete layers where the device finds them."""
        for command in commands:
            load = self._by_name[command.load]
            match command:
                case ReadRun(number, name):
                    self.spawn(self._read(load, command), f"read {number} of {name}")
                case DeliverLayer(_, layer):
                    load.put_layer(layer)

    async def _read(self, load: Load, run: ReadRun) -> None:
        """One read; then hand on all layers that are complete and next in order."""
        if load.open:
            tiers = load.stored_by_tier(run.segments)
            layers = range(run.first, run.stop)
            await asyncio.gather(*(self._read_tier(load, tier, leases, layers) for tier, leases in tiers.items()))
        for other in self._by_name.values():
            if other.layers is not None:
                self._state.note_taken(other.name, other.layers.taken)
        self._perform(self._state.read_done(run.number))
        await self._tell_layers(load)

    async def _read_tier(self, load: Load, tier: Tier, leases: dict[int, ChunkLease], layers: range) -> None:
        # a task of its own: what was leased when it was made may be released before it runs
        leases, meter, done = load.stored_by_tier(list(leases)).get(tier, {}), self._meters[tier], 0
        meter.begin(time.monotonic())
        try:
            errors = await prefetch_all(list(leases.values()), layers)
            for (segment, lease), error in zip(leases.items(), errors, strict=True):
                if error is None:
                    done += len(layers) * lease.layer_bytes
                else:
                    self._read_failed(load, segment, error)
        finally:
            meter.end(done, time.monotonic())

    def _read_failed(self, load: Load, segment: int, error: ChunkDamaged) -> None:
        """Nothing more is delivered of this load. Its leases stay until the scheduler has them released."""
        if self._by_name.pop(load.name, None) is None:
            return
        self._perform(self._state.close(load.name))
        if load.layers is None:
            # only looked ahead: the look-up finds out what is left
            load.leases.pop(segment).release()
        else:
            load.open = False
            self._tell(ev.LoadFailed(load.job.request_id, error.reason, time.monotonic()))

    async def _tell_layers(self, load: Load) -> None:
        """Tell the blender of layers in order; whoever comes meanwhile leaves that to the first."""
        if load.telling:
            return
        load.telling = True
        try:
            while load.outbox and load.open:
                await self._blender.tell(LayerLoaded(load.job.request_id, load.outbox.popleft()))
        except MailboxClosed:
            log.debug("the blender is not there to hear of layers of %s", load.job.request_id)
        finally:
            load.telling = False

    # ---- writing ----

    async def _write(self, command: ev.StoreSegment, payloads: Captured | None) -> None:
        created, error = False, ""
        if payloads is None:
            error = "the captured KV is gone"
        elif isinstance(payloads, str):
            error = f"not stored: {payloads}"
        else:
            try:
                created = await self._store.put(
                    command.key,
                    command.token_ids,
                    payloads,
                    cost_s=command.cost_s,
                    replace=command.replace,
                    tier=TIERS.get(command.tier),
                )
            except StoreError as problem:
                error = f"not stored: {problem}"
                log.warning("chunk %s of request %s was %s", command.key.id[:16], command.request_id, error)
        self._tell(ev.Stored(command.request_id, command.key, created, error, time.monotonic()))

    def _tell(self, event: ev.SchedulerEvent) -> None:
        try:
            self._scheduler.tell_nowait(event, "system")
        except ActorDied:
            log.debug("the scheduler is not there to hear of %s", type(event).__name__)
