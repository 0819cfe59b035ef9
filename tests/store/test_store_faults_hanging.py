"""A disk that hangs in the middle of something: whoever does not need that step goes on, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.errors import ChunkDamaged
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from kvblend.store.format import KVShape
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample


async def cold(open_store: OpenStore, root: Path, io: FaultyIO, *samples: Sample) -> ChunkStore:
    """A store in which the samples lie on disk only."""
    store = await open_store(root, io)
    for one in samples:
        await store.put(one.key, one.ids, one.layers)
        store.evict_nowait(one.key.id)
    io.calls.clear()
    io.arrived.clear()
    return store


async def read_all(store: ChunkStore, one: Sample) -> list[bytearray] | None:
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return None
    with lease:
        await lease.prefetch(range(len(one.layers)))
        return [bytearray(await lease.layer(index)) for index in range(len(one.layers))]


@pytest.mark.parametrize("step", ["read_heads", "read_into"])
async def test_a_second_lease_waits_for_the_same_read(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, step: str
) -> None:
    one = sample()
    store = await cold(open_store, tmp_path, io, one)
    io.gate(step)
    first = asyncio.create_task(read_all(store, one))
    await io.arrived[step].acquire()
    second = asyncio.create_task(read_all(store, one))
    await asyncio.sleep(0)
    io.open_gate(step)
    assert list(await asyncio.gather(first, second)) == [one.layers, one.layers]
    assert io.calls.count(step) == 1


@pytest.mark.parametrize("step", ["read_heads", "read_into"])
async def test_others_are_stored_and_served_while_a_read_hangs(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, step: str
) -> None:
    one, two = sample(1), sample(2)
    store = await cold(open_store, tmp_path, io, one)
    io.gate(step)
    hanging = asyncio.create_task(read_all(store, one))
    await io.arrived[step].acquire()
    assert await store.put(two.key, two.ids, two.layers)
    assert await read_all(store, two) == two.layers
    assert not hanging.done()
    io.open_gate(step)
    assert await hanging == one.layers


@pytest.mark.parametrize("step", ["write_file", "rename", "sync_folder"])
async def test_a_chunk_is_a_miss_at_once_while_its_write_hangs(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, step: str
) -> None:
    one, other = sample(1), sample(2)
    store = await cold(open_store, tmp_path, io, other)
    # its folder is there, so that the last sync is the one behind the rename
    one.path(tmp_path).parent.mkdir(exist_ok=True)
    io.gate(step)
    writing = asyncio.create_task(store.put(one.key, one.ids, one.layers))
    await io.arrived[step].acquire()
    assert await read_all(store, one) is None
    assert await read_all(store, other) == other.layers
    io.open_gate(step)
    assert await writing
    assert await read_all(store, one) == one.layers


async def test_a_delete_behind_a_hanging_write_has_the_last_word(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    one = sample()
    store = await cold(open_store, tmp_path, io)
    io.gate("rename")
    writing = asyncio.create_task(store.put(one.key, one.ids, one.layers))
    await io.arrived["rename"].acquire()
    deleting = asyncio.create_task(store.delete(one.key.id))
    await asyncio.sleep(0)
    io.open_gate("rename")
    assert list(await asyncio.gather(writing, deleting)) == [True, True]
    assert (store.contains(one.key), one.path(tmp_path).exists()) == (False, False)


async def test_a_read_that_fails_after_hanging_is_a_miss_for_all_who_waited(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    one = sample()
    store = await cold(open_store, tmp_path, io, one)
    io.gate("read_into")
    io.fail("read_into", OSError(5, "Input/output error"))
    readers = [asyncio.create_task(read_all(store, one)) for _ in range(3)]
    await io.arrived["read_into"].acquire()
    io.open_gate("read_into")
    for result in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(result, ChunkDamaged)
    assert store.stats().leases == 0
    assert await store.put(one.key, one.ids, one.layers)


async def test_an_eviction_from_disk_hangs_for_the_newcomer_only(
    shape: KVShape, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    one, two, three = (sample(number) for number in range(3))
    file_bytes = 4096 * (1 + len(one.layers))
    store = await ChunkStore.open(
        tmp_path,
        shape,
        "model-a",
        1 << 20,
        io,
        disk_bytes_budget=2 * file_bytes,
        disk_policy="lru",
    )
    async with store:
        for each in (one, two):
            await store.put(each.key, each.ids, each.layers)
        io.arrived.clear()
        io.gate("remove")
        writing = asyncio.create_task(store.put(three.key, three.ids, three.layers))
        await io.arrived["remove"].acquire()
        assert await read_all(store, two) == two.layers
        io.open_gate("remove")
        assert await writing
        assert (store.contains(one.key), store.contains(three.key)) == (False, True)
        assert store.stats().disk_bytes <= 2 * file_bytes
