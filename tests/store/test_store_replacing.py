"""Replacing a chunk: one of the two is there at any moment, and who reads the old one reads it to the end."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_remote import FakeRemote
from store_steps import FILE_BYTES

from kvblend.store.errors import StoreWriteFailed
from kvblend.store.format import KVShape
from kvblend.store.keys import pack_ids
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample

BROKEN = OSError(errno.EIO, "Input/output error")


def anew(one: Sample) -> list[bytes]:
    """Other KV for the same chunk."""
    return [bytes(byte ^ 0xFF for byte in layer) for layer in one.layers]


async def replace(store: ChunkStore, one: Sample) -> bool:
    return await store.put(one.key, one.ids, [bytearray(layer) for layer in anew(one)], replace=True)


async def served(store: ChunkStore, one: Sample) -> list[bytes] | None:
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return None
    with lease:
        await lease.prefetch(range(4))
        return [bytes(await lease.layer(index)) for index in range(4)]


async def test_a_replaced_chunk_is_the_new_one_after_a_restart(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path)
    await store.put(sample().key, sample().ids, sample().layers)
    assert await replace(store, sample())
    assert await served(store, sample()) == anew(sample())
    await store.close()
    store = await open_store(tmp_path)
    assert await served(store, sample()) == anew(sample())
    assert (store.stats().chunks, store.stats().disk_bytes, store.stats().damaged) == (1, FILE_BYTES, 0)


async def test_the_old_file_is_there_until_the_new_one_takes_its_place(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io)
    await store.put(sample().key, sample().ids, sample().layers)
    before = sample().path(tmp_path).read_bytes()
    io.arrived.clear()
    io.gate("rename")
    replacing = asyncio.create_task(replace(store, sample()))
    await io.arrived["rename"].acquire()
    assert sample().path(tmp_path).read_bytes() == before
    io.open_gate("rename")
    assert await replacing
    assert "remove" not in io.calls
    assert sample().path(tmp_path).read_bytes() != before


async def test_what_is_not_there_is_just_stored(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    assert await replace(store, sample())
    assert await served(store, sample()) == anew(sample())


async def test_a_lease_of_the_old_one_is_read_to_the_end(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await store.put(sample().key, sample().ids, sample().layers)
    assert store.evict_nowait(sample().key.id)
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    with lease:
        await lease.layer(0)
        await replace(store, sample())
        assert [bytes(await lease.layer(index)) for index in range(4)] == sample().layers
        assert await served(store, sample()) == anew(sample())
    assert store.stats().damaged == 0


async def test_a_header_of_the_old_one_that_comes_late_is_not_used(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io)
    await store.put(sample().key, sample().ids, sample().layers)
    assert store.evict_nowait(sample().key.id)
    io.gate("heads_read")
    reading = asyncio.create_task(served(store, sample()))
    await io.arrived["heads_read"].acquire()
    await replace(store, sample())
    io.open_gate("heads_read")
    assert await reading in (None, anew(sample()))
    assert await served(store, sample()) == anew(sample())


@pytest.mark.parametrize("step", ["write_file", "rename", "sync_folder"])
async def test_a_replacement_that_fails_leaves_one_of_the_two(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, step: str
) -> None:
    store = await open_store(tmp_path, io, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")
    await store.put(sample().key, sample().ids, sample().layers)
    io.fail(step, BROKEN)
    with pytest.raises(StoreWriteFailed):
        await replace(store, sample())
    for _ in range(2):
        wanted = anew(sample()) if step == "sync_folder" else sample().layers
        assert await served(store, sample()) == wanted
        assert (store.stats().chunks, store.stats().disk_bytes) == (1, FILE_BYTES)
        await store.close()
        store = await open_store(tmp_path, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")


async def test_a_chunk_that_could_not_be_replaced_may_be_evicted_again(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io, disk_bytes_budget=FILE_BYTES)
    await store.put(sample(0).key, sample(0).ids, sample(0).layers)
    io.fail("write_file", BROKEN)
    with pytest.raises(StoreWriteFailed):
        await replace(store, sample(0))
    await store.put(sample(1).key, sample(1).ids, sample(1).layers)
    assert [store.contains(sample(number).key) for number in range(2)] == [False, True]


async def test_a_full_store_replaces_without_evicting_anybody(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")
    for number in range(2):
        await store.put(sample(number).key, sample(number).ids, sample(number).layers)
    assert await replace(store, sample(0))
    assert (store.stats().chunks, store.stats().evictions_disk) == (2, 0)
    await store.put(sample(2).key, sample(2).ids, sample(2).layers)
    assert [store.contains(sample(number).key) for number in range(3)] == [True, False, True]


async def test_the_one_that_is_replaced_does_not_make_room_for_itself(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    """A longer layer form: the new file is larger, and the oldest chunk is the one that is replaced."""
    store = await open_store(tmp_path, io, disk_bytes_budget=12 * 4096, disk_policy="lru")
    one = sample(0, tokens=60)
    floats = [bytes(layer) + bytes(4 * 60) for layer in one.layers]
    await store.put(one.key, one.ids, one.layers)
    await store.put(sample(1).key, sample(1).ids, sample(1).layers)
    assert await store.put(one.key, one.ids, [bytearray(layer) for layer in floats], replace=True)
    assert await served(store, one) == floats
    assert store.stats().disk_bytes <= 12 * 4096


async def test_in_memory_alone_the_new_one_is_served(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    await store.put(sample().key, sample().ids, sample().layers)
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    with lease:
        assert await replace(store, sample())
        assert bytes(await lease.layer(0)) == sample().layers[0]
    assert await served(store, sample()) == anew(sample())


async def test_the_remote_tier_gets_the_new_one(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    remote = FakeRemote(shape)
    store = await open_store(tmp_path, remote=remote)
    await store.put(sample().key, sample().ids, sample().layers)
    await replace(store, sample())
    await store.close()
    assert remote.chunks[sample().key.digest][1] == anew(sample())


@pytest.mark.parametrize("has_folder", [True, False])
async def test_a_lease_from_the_remote_tier_is_read_to_the_end(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path, has_folder: bool
) -> None:
    remote = FakeRemote(shape)
    remote.keep(sample().key, pack_ids(sample().ids), sample().layers)
    store = await open_store(tmp_path if has_folder else None, remote=remote)
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    with lease:
        await lease.layer(0)
        await replace(store, sample())
        await store._copies.close(1.0)
        assert remote.chunks[sample().key.digest][1] == anew(sample())
        assert [bytes(await lease.layer(index)) for index in range(4)] == sample().layers
    assert await served(store, sample()) == anew(sample())


async def test_nobody_leases_the_remote_copy_while_it_is_replaced(
    open_store: OpenStore, sample: Make, shape: KVShape
) -> None:
    remote = FakeRemote(shape)
    remote.keep(sample().key, pack_ids(sample().ids), sample().layers)
    store = await open_store(None, remote=remote)
    remote.gate("fetch_header")
    early = asyncio.create_task(store.lease(sample().key, sample().ids))
    await remote.arrived("fetch_header")
    remote.gate("write")
    replacing = asyncio.create_task(replace(store, sample()))
    await remote.arrived("write")
    remote.open_gate("fetch_header")
    leases = [await early, await store.lease(sample().key, sample().ids)]
    remote.open_gate("write")
    await replacing
    assert leases == [None, None]
    assert await served(store, sample()) == anew(sample())
