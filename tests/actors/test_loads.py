"""What a load leases: the best stored variant of every segment, kept where it was leased ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from core_driver import SYSTEM, A, B, generate, key_of
from device_pool_rig import new_block
from shell_rig import SHAPE, payloads

from kvblend.actors.core.jobs import Hit
from kvblend.actors.core.loading import Rank
from kvblend.actors.device_pool import DevicePool
from kvblend.actors.loads import Load, lease_segments, missing_layers
from kvblend.actors.tables import RequestLayers
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore


@asynccontextmanager
async def open_store() -> AsyncIterator[ChunkStore]:
    async with await ChunkStore.open(None, SHAPE, "m", 1 << 20) as store:
        await store.put(key_of(SYSTEM, ()), SYSTEM, payloads(len(SYSTEM)))
        await store.put(key_of(B), B, payloads(len(B)))
        yield store


def new_load() -> Load:
    return Load("r#1", generate("r", A, B), Rank())


async def bring(pool: DevicePool, store: ChunkStore, key: ChunkKey, ids: tuple[int, ...]) -> None:
    """Have a chunk on the device, as a request that used it leaves it."""
    stored = await store.lease(key, ids)
    assert stored is not None
    held = pool.admit(stored)
    for layer in range(SHAPE.num_layers):
        part = held.layer_nowait(layer)
        assert callable(part)
        part()
    held.release()


async def lease(load: Load, store: ChunkStore, **more: Any) -> list[tuple[int, bool]]:
    found = await lease_segments(load, store, lambda _: True, lambda *_: None, **more)
    return [(hit.segment, hit.exact) for hit in found]


async def test_hits_come_in_the_order_of_segments_with_what_is_missing() -> None:
    async with open_store() as store:
        load = new_load()
        assert await lease(load, store) == [(0, True), (2, False)]
        load.segments = (0, 2)
        assert load.missing(SHAPE.num_layers) == {0: set(), 2: set()}
        load.close_leases()
        assert (load.leases, store.stats().leases) == ({}, 0)


async def test_a_hit_has_the_bytes_of_what_stands_behind_k_and_v_too(tmp_path: Path) -> None:
    async with await ChunkStore.open(tmp_path, SHAPE, "m", 1 << 20) as store:
        longest = SHAPE.layer_lengths(len(B))[-1]
        await store.put(key_of(B), B, [bytearray(longest) for _ in range(SHAPE.num_layers)])
        store.evict_nowait(key_of(B).id)
        load = new_load()
        (hit,) = await lease_segments(load, store, lambda _: True, lambda *_: None)
        assert hit.num_bytes == SHAPE.num_layers * longest
        load.close_leases()


async def test_only_what_is_wanted_is_leased() -> None:
    async with open_store() as store:
        load = new_load()
        hits = await lease_segments(load, store, lambda index: index == 2, lambda *_: None)
        assert [hit.segment for hit in hits] == [2]
        load.close_leases()


async def test_every_new_lease_is_reported_with_its_seconds() -> None:
    async with open_store() as store:
        load, seen = new_load(), list[tuple[str, bool]]()
        for _ in range(2):
            await lease_segments(load, store, lambda _: True, lambda new, s: seen.append((new.key.id, s >= 0.0)))
        assert sorted(seen) == sorted([(key_of(SYSTEM, ()).id, True), (key_of(B).id, True)])
        load.close_leases()


async def test_what_the_device_pool_has_is_leased_there_and_has_nothing_to_read(tmp_path: Path) -> None:
    async with await ChunkStore.open(tmp_path, SHAPE, "m", 1 << 20) as store:
        for key, ids in ((key_of(SYSTEM, ()), SYSTEM), (key_of(B), B)):
            await store.put(key, ids, payloads(len(ids)))
        pool, load = DevicePool(store, 1 << 16, new_block), new_load()
        await bring(pool, store, key_of(B), B)
        for key in (key_of(SYSTEM, ()), key_of(B)):
            assert store.evict_nowait(key.id)
        seen: list[str] = []
        hits = await lease_segments(load, store, lambda _: True, lambda new, _: seen.append(new.tier), pool=pool)
        size = SHAPE.num_layers * SHAPE.layer_bytes(len(SYSTEM))
        assert hits == [Hit(0, True, "disk", size), Hit(2, False, "device_pool", 0)]
        assert seen == ["disk"]
        load.close_leases()
        pool.validate()


async def test_a_better_variant_comes_before_a_worse_one_on_the_device() -> None:
    async with open_store() as store:
        pool, load = DevicePool(store, 1 << 16, new_block), new_load()
        await bring(pool, store, key_of(B), B)
        await store.put(key_of(B, (*SYSTEM, *A)), B, payloads(len(B)))
        hits = await lease_segments(load, store, lambda index: index == 2, lambda *_: None, pool=pool)
        assert hits == [Hit(2, True, "host", 0)]
        load.close_leases()


async def test_what_was_leased_ahead_is_kept() -> None:
    async with open_store() as store:
        load = new_load()
        await lease(load, store)
        before = dict(load.leases)
        await lease(load, store)
        assert load.leases == before
        assert store.stats().leases == 2
        load.close_leases()


async def test_a_better_variant_that_was_stored_meanwhile_takes_the_place_of_the_one_leased_ahead() -> None:
    async with open_store() as store:
        load = new_load()
        await lease(load, store)
        await store.put(key_of(B, (*SYSTEM, *A)), B, payloads(len(B)))
        assert await lease(load, store) == [(0, True), (2, True)]
        assert store.stats().leases == 2
        load.close_leases()


async def test_a_chunk_that_is_gone_meanwhile_is_no_hit() -> None:
    async with open_store() as store:
        load = new_load()
        await lease(load, store)
        await store.delete(key_of(B).id)
        assert await lease(load, store) == [(0, True)]
        load.close_leases()


async def test_a_load_that_is_closed_leases_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_store() as store:
        load, real = new_load(), store.lease
        entered, gate = asyncio.Event(), asyncio.Event()

        async def slow(*args: Any) -> Any:
            entered.set()
            await gate.wait()
            return await real(*args)

        monkeypatch.setattr(store, "lease", slow)
        looking = asyncio.create_task(lease(load, store, at_once=1))
        await entered.wait()
        load.open = False
        gate.set()
        assert await looking == []
        load.close_leases()
        assert store.stats().leases == 0


async def test_a_layer_goes_to_the_device_with_all_its_segments() -> None:
    async with open_store() as store:
        load = new_load()
        await lease(load, store)
        load.segments, load.layers = (0, 2), RequestLayers()
        load.put_layer(1)
        parts = load.layers.take(1)
        assert parts is not None
        assert [(start, view[0]) for start, view in parts] == [(0, 2), (len(SYSTEM) + len(A), 2)]
        assert (list(load.outbox), load.layers.taken) == ([1], 2)
        load.close_leases()


async def test_a_load_that_only_looks_ahead_hands_nothing_to_the_device() -> None:
    with pytest.raises(ValueError, match="only looks ahead"):
        new_load().put_layer(0)


async def test_missing_layers_are_those_that_are_not_in_memory() -> None:
    async with open_store() as store:
        lease_of_b = await store.lease(key_of(B), B)
        assert lease_of_b is not None
        assert missing_layers(lease_of_b, SHAPE.num_layers) == set()
        lease_of_b.release()
