"""One request's loading as the loader holds it: leases by segment, and the layers that are on their way."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvblend.actors.core import events as ev
from kvblend.actors.core.loading import Rank
from kvblend.actors.device_pool import DevicePool, LayerLease
from kvblend.actors.tables import RequestLayers
from kvblend.store.keys import ChunkKey
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore
from kvblend.store.tiers import Tier

LOOKUPS_MAX = 16
"""How many segments of one request are looked up at the same time."""


@dataclass(slots=True, eq=False)
class Load:
    """One request's leases, by segment, and where its layers go. `open` False: whatever comes back is dropped.

    `outbox` are layers that lie in the side table and that the blender has not been told of.
    """

    name: str
    job: ev.Job
    rank: Rank
    leases: dict[int, LayerLease] = field(default_factory=dict)
    segments: tuple[int, ...] = ()
    layers: RequestLayers | None = None
    open: bool = True
    outbox: deque[int] = field(default_factory=deque)
    telling: bool = False

    def close_leases(self) -> None:
        """Give all leases back. Reads that are out hold what they need themselves."""
        for lease in self.leases.values():
            lease.release()
        self.leases.clear()

    def stored_by_tier(self, segments: Sequence[int]) -> dict[Tier, dict[int, ChunkLease]]:
        """Of these segments, what layers can be read through, by tier and segment."""
        found: dict[Tier, dict[int, ChunkLease]] = {}
        for index in segments:
            lease = self.leases[index].stored if index in self.leases else None
            if lease is not None:
                found.setdefault(lease.tier, {})[index] = lease
        return found

    def missing(self, num_layers: int) -> dict[int, set[int]]:
        """By segment that is to be loaded: its layers that are neither in memory nor on the device."""
        return {index: missing_layers(self.leases[index], num_layers) for index in self.segments}

    def put_layer(self, layer: int) -> None:
        """Hand one layer to the device; all its segments are in memory, or there already."""
        if self.layers is None:
            raise ValueError(f"{self.name} only looks ahead")
        starts = self.job.layout.segments
        parts = [(starts[index].start, self.leases[index].layer_nowait(layer)) for index in self.segments]
        self.layers.put(layer, [(start, part) for start, part in parts if part is not None])
        self.outbox.append(layer)


def missing_layers(lease: LayerLease, num_layers: int) -> set[int]:
    """The layers of a chunk that are neither in memory nor on the device."""
    return {layer for layer in range(num_layers) if lease.layer_nowait(layer) is None}


async def lease_segments(
    load: Load,
    store: ChunkStore,
    wanted: Callable[[int], bool],
    leased: Callable[[ChunkLease, float], None],
    at_once: int = LOOKUPS_MAX,
    pool: DevicePool | None = None,
) -> list[ev.Hit]:
    """Lease the best stored variant of every segment that `wanted` agrees to; what is leased already is kept.

    What `pool` has is leased there. `leased` hears of each lease of `store` and of the seconds that it took. Leaves all
    to the caller to give back, and stops early where the load is closed meanwhile.
    """
    slots = asyncio.Semaphore(at_once)
    hits: list[ev.Hit] = []

    async def look_up(index: int) -> None:
        keys, ids = load.job.keys[index], load.job.layout.segments[index].token_ids
        async with slots:
            if not load.open or not keys.lookup or not wanted(index):
                return
            exact = await _best(load, store, index, keys.lookup, ids, leased, pool)
        if exact is not None and load.open:
            lease = load.leases[index]
            gone = len(missing_layers(lease, store.shape.num_layers))
            hits.append(ev.Hit(index, exact, lease.tier, gone * lease.layer_bytes))

    async with asyncio.TaskGroup() as group:
        for index in range(len(load.job.keys)):
            group.create_task(look_up(index))
    return sorted(hits, key=lambda hit: hit.segment)


async def _best(
    load: Load,
    store: ChunkStore,
    index: int,
    lookup: Sequence[tuple[ChunkKey, bool]],
    ids: tuple[int, ...],
    leased: Callable[[ChunkLease, float], None],
    pool: DevicePool | None,
) -> bool | None:
    """Put the first variant that is stored into the load's leases; whether it is exact, or None for a miss."""
    held = load.leases.get(index)
    if held is not None and not store.contains(held.key):
        # found damaged, or deleted, while it was looked ahead
        load.leases.pop(index).release()
        held = None
    for key, exact in lookup:
        if held is not None and held.key == key:
            return exact
        if held is not None and not store.contains(key):
            continue
        lease: LayerLease | None = None if pool is None else pool.lease(key)
        if lease is None:
            began = time.monotonic()
            lease = stored = await store.lease(key, ids)
            if stored is not None:
                leased(stored, time.monotonic() - began)
        if lease is not None:
            if held is not None:
                held.release()
            load.leases[index] = lease
            return exact
    return None
