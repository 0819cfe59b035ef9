"""The loader above a device pool: what it looks up there, what it brings there, and what it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from core_driver import SYSTEM, A, B, generate, key_of
from device_pool_rig import new_block
from recorder import Stage, open_stage
from shell_rig import SHAPE, GatedDisk, put

from kvblend.actors.core import events as ev
from kvblend.actors.device_pool import DevicePool
from kvblend.actors.loader import Loader
from kvblend.actors.signals import LayerLoaded, Reset
from kvblend.actors.tables import SideTables
from kvblend.store.store import ChunkStore

SEGMENTS = (0, 1, 2)


class World:
    """A loader with a pool above chunks that lie on disk only."""

    def __init__(self, stage: Stage, store: ChunkStore, disk: GatedDisk, budget: int) -> None:
        self.stage, self.store, self.disk, self.tables = stage, store, disk, SideTables()
        self.pool = DevicePool(store, budget, new_block)
        scheduler, blender = stage.listen("scheduler"), stage.listen("blender")
        self.loader = stage.play("loader", lambda: Loader(store, self.tables, scheduler, blender, 2, pool=self.pool))

    async def look_up(self, name: str) -> list[tuple[str, int]]:
        await self.loader.tell(ev.Lookup(generate(name, A, B)))
        found = await self.stage.hear("scheduler", ev.LookedUp)
        return [(hit.tier, hit.num_bytes) for hit in found.hits]

    async def load(self, name: str) -> list[tuple[str, int]]:
        """Look up, load, and take all layers as the device does. The hits."""
        hits = await self.look_up(name)
        await self.loader.tell(ev.StartLoading(name, SEGMENTS))
        for layer in range(SHAPE.num_layers):
            assert await self.stage.hear("blender", LayerLoaded) == LayerLoaded(name, layer)
            assert self.tables.layers[name].take(layer) is not None
        return hits

    async def release(self, message: Any) -> None:
        await self.loader.tell(message)
        # whatever is answered behind it
        await self.loader.tell(ev.StoreSegment("sync", 0, key_of(A), A))
        await self.stage.hear("scheduler", ev.Stored)


@asynccontextmanager
async def open_world(root: Path, budget: int = 1 << 16) -> AsyncIterator[World]:
    disk = GatedDisk()
    async with await ChunkStore.open(root, SHAPE, "m", 1 << 20, disk) as store:
        await put(store, SYSTEM, key_of(SYSTEM, ()))
        await put(store, A)
        await put(store, B)
        async with open_stage() as stage:
            yield World(stage, store, disk, budget)


async def test_what_one_request_loaded_the_next_one_finds_on_the_device(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        assert {tier for tier, _ in await world.load("r1")} == {"disk"}
        await world.release(ev.Release("r1"))
        for ids, behind in ((SYSTEM, ()), (A, SYSTEM), (B, SYSTEM)):
            assert world.store.evict_nowait(key_of(ids, behind).id)
        reads = world.disk.read_count
        assert await world.load("r2") == [("device_pool", 0)] * 3
        assert (world.disk.read_count, world.store.stats().leases) == (reads, 0)


async def test_leases_of_the_pool_last_as_long_as_the_request(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.load("r1")
        await world.load("r2")
        await world.release(ev.Release("r1"))
        assert world.pool.stats().pinned_bytes == world.pool.stats().num_bytes > 0
        await world.release(ev.Release("r2"))
        assert world.pool.stats().pinned_bytes == 0
        world.pool.validate()


async def test_a_reset_gives_all_of_them_back(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.load("r1")
        await world.release(Reset())
        assert world.pool.stats().pinned_bytes == 0
        world.pool.validate()


async def test_segments_that_are_looked_up_and_not_used_bring_nothing_in(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.look_up("r1")
        await world.release(ev.Release("r1"))
        assert world.pool.stats().fills == 0


async def test_without_room_in_the_pool_everything_is_loaded_all_the_same(tmp_path: Path) -> None:
    async with open_world(tmp_path, budget=1) as world:
        await world.load("r1")
        assert (world.pool.stats().skipped, world.pool.stats().num_bytes) == (3, 0)


async def test_a_dropped_chunk_leaves_the_device(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.load("r1")
        await world.loader.tell(ev.DropChunks("r1", (1,), "its keys are wrong"))
        await world.release(ev.Release("r1"))
        async with asyncio.timeout(10.0):
            while world.store.contains(key_of(A)):  # noqa: ASYNC110  (what is waited for sets no event)
                await asyncio.sleep(0)
        assert world.pool.lease(key_of(A)) is None
        world.pool.validate()
