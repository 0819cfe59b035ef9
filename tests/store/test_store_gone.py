"""What a store tells those who keep copies of its chunks: which are of no use any more, and what they tell it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_remote import FakeRemote
from store_steps import FILE_BYTES, keep, put

from kvblend.store.errors import ChunkDamaged
from kvblend.store.format import KVShape
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample


def watched(store: ChunkStore) -> list[bytes]:
    gone: list[bytes] = []
    store.watch_gone(gone.append)
    return gone


async def is_current(store: ChunkStore, one: Sample) -> bool:
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    with lease:
        return lease.is_current


async def test_a_deleted_chunk_is_gone(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    gone = watched(store)
    await store.delete(sample().key.id)
    assert sample().key.digest in gone


async def test_a_chunk_is_gone_before_its_file_is(
    open_store: OpenStore, sample: Make, tmp_path: Path, io: FaultyIO
) -> None:
    store = await open_store(tmp_path, io)
    await put(store, sample())
    removed: list[bool] = []
    store.watch_gone(lambda _: removed.append("remove" in io.calls))
    await store.delete(sample().key.id)
    assert (removed, "remove" in io.calls) == ([False], True)


async def test_a_chunk_that_is_stored_anew_is_gone(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    gone = watched(store)
    await store.put(sample().key, sample().ids, sample().layers, replace=True)
    assert sample().key.digest in gone


async def test_a_chunk_that_leaves_the_folder_for_others_is_gone(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, disk_bytes_budget=1 << 20, disk_policy="lru")
    store._shelf.space.bytes_budget = FILE_BYTES
    await put(store, sample(0))
    gone = watched(store)
    await put(store, sample(100))
    assert sample(0).key.digest in gone
    assert sample(100).key.digest not in gone


async def test_a_chunk_that_leaves_memory_only_is_not_gone(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    gone = watched(store)
    assert store.evict_nowait(sample().key.id)
    assert gone == []


async def test_without_a_folder_what_leaves_memory_is_gone(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    await put(store, sample())
    gone = watched(store)
    assert store.evict_nowait(sample().key.id)
    assert gone == [sample().key.digest]


async def test_what_leaves_memory_before_it_is_copied_to_the_folder_is_gone(
    open_store: OpenStore, sample: Make, tmp_path: Path, shape: KVShape
) -> None:
    remote = FakeRemote(shape)
    keep(remote, sample())
    store = await open_store(tmp_path, remote=remote)
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    lease.release()
    gone = watched(store)
    assert store.evict_nowait(sample().key.id)
    assert gone == [sample().key.digest]


async def test_a_damaged_chunk_is_gone(open_store: OpenStore, sample: Make, tmp_path: Path, io: FaultyIO) -> None:
    store = await open_store(tmp_path, io)
    await put(store, sample())
    store.evict_nowait(sample().key.id)
    gone = watched(store)
    io.flip_reads = True
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    with lease, pytest.raises(ChunkDamaged):
        await lease.layer(0)
    assert sample().key.digest in gone


async def test_a_lease_is_current_until_its_chunk_is_deleted_or_stored_anew(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path)
    await put(store, sample(0), sample(100))
    held = [await store.lease(one.key, one.ids) for one in (sample(0), sample(100))]
    assert [lease.is_current for lease in held if lease] == [True, True]
    await store.delete(sample(0).key.id)
    await store.put(sample(100).key, sample(100).ids, sample(100).layers, replace=True)
    assert [lease.is_current for lease in held if lease] == [False, False]
    assert await is_current(store, sample(100))
    for lease in held:
        assert lease is not None
        lease.release()


async def test_without_a_folder_the_use_of_a_copy_keeps_a_chunk_in_memory(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None, budget=2 * sample().num_bytes)
    await put(store, sample(0), sample(100))
    store.use_nowait(sample(0).key)
    await put(store, sample(200))
    assert [store.contains(sample(n).key) for n in (0, 100, 200)] == [True, False, True]


async def test_the_use_of_a_copy_counts_in_the_folder_and_not_in_memory_above_it(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, budget=2 * sample().num_bytes)
    await put(store, sample(0), sample(100))
    store.use_nowait(sample(0).key)
    row = store._shelf.index.get(sample(0).key.digest)
    assert row is not None
    assert row.hits == 1
    await put(store, sample(200))
    assert store._pool.get(sample(0).key.digest) is None


async def test_the_use_of_a_copy_keeps_a_chunk_in_memory_that_is_not_in_the_folder(
    open_store: OpenStore, sample: Make, tmp_path: Path, shape: KVShape
) -> None:
    remote = FakeRemote(shape)
    keep(remote, sample(0))
    store = await open_store(tmp_path, remote=remote)
    await put(store, sample(100))
    for one in (sample(0), sample(100)):
        lease = await store.lease(one.key, one.ids)
        assert lease is not None
        lease.release()
    assert sample(0).key.digest not in store._shelf.index
    store.use_nowait(sample(0).key)
    assert store._pool._policy.pop() == sample(100).key.digest


async def test_the_use_of_a_copy_of_an_unknown_chunk_is_ignored(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    store.use_nowait(sample().key)
    assert not store.contains(sample().key)
