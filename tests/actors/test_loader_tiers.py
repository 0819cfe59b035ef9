"""The loader and the tiers below memory: their speed at the start, and where a new chunk is to lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from core_driver import A, B, generate, key_of
from recorder import open_stage

from kvblend.actors.core import events as ev
from kvblend.actors.loader import Loader
from kvblend.actors.tables import SideTables
from kvblend.store.format import KVShape
from kvblend.store.probing import Reading
from kvblend.store.store import ChunkStore

SHAPE = KVShape(3, 1, 2, "float32")
JOB = generate("r", A, B)


def payloads(ids: tuple[int, ...]) -> list[memoryview]:
    """One payload per layer."""
    return [memoryview(bytearray(SHAPE.layer_bytes(len(ids)))) for _ in range(SHAPE.num_layers)]


class SlowReadings:
    """What a store's look at its own tiers finds, as if each reading had taken half a second."""

    def __init__(self, store: ChunkStore) -> None:
        self.done = asyncio.Event()
        self.num_bytes = 0
        self._look = store.probe
        store.probe = self.probe  # type: ignore[method-assign]

    async def probe(self, seconds_max: float) -> AsyncGenerator[Reading, None]:
        async with aclosing(self._look(seconds_max)) as readings:
            async for reading in readings:
                self.num_bytes = reading.num_bytes
                yield reading._replace(ended_s=reading.began_s + 0.5)
        self.done.set()


async def test_the_speed_of_a_tier_is_known_before_the_first_request(tmp_path: Path) -> None:
    ids = tuple(range(1, 20_001))
    async with await ChunkStore.open(tmp_path, SHAPE, "m", 1 << 24) as store:
        await store.put(key_of(ids), ids, payloads(ids))
        slow = SlowReadings(store)
        async with open_stage() as stage:
            scheduler, blender = stage.listen("scheduler"), stage.listen("blender")
            loader = stage.play("loader", lambda: Loader(store, SideTables(), scheduler, blender, 2, probe_s=60.0))
            await slow.done.wait()
            await loader.tell(ev.Lookup(JOB))
            found = await stage.hear("scheduler", ev.LookedUp)
            assert found.speeds["disk"].bytes_per_s == pytest.approx(slow.num_bytes / 0.5)
            assert found.speeds["disk"].latency_s > 0


@pytest.mark.parametrize(("tier", "gone"), [("disk", 1), ("remote", 1), ("host", 0), ("", 0)])
async def test_a_chunk_leaves_memory_first_where_loading_it_from_below_hides(
    tmp_path: Path, tier: str, gone: int
) -> None:
    chunks = [tuple(range(first, first + 4)) for first in (100, 200, 300)]
    budget = 2 * SHAPE.num_layers * SHAPE.layer_bytes(4)
    async with await ChunkStore.open(tmp_path, SHAPE, "m", budget) as store, open_stage() as stage:
        tables = SideTables()
        scheduler, blender = stage.listen("scheduler"), stage.listen("blender")
        loader = stage.play("loader", lambda: Loader(store, tables, scheduler, blender, 2))
        # it has started when it answers: that clears the table of captured chunks
        await loader.tell(ev.Lookup(JOB))
        await stage.hear("scheduler", ev.LookedUp)
        for index, ids in enumerate(chunks):
            tables.captured["r", index] = payloads(ids)
            await loader.tell(ev.StoreSegment("r", index, key_of(ids), ids, tier=tier if index == 1 else ""))
            await stage.hear("scheduler", ev.Stored)
        kept = [store.evict_nowait(key_of(ids).id) for ids in chunks]
        assert kept == [index != gone for index in range(3)]
