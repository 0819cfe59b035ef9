"""Chunks that go: deleted in every tier, or evicted from the disk to make room."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_remote import FakeRemote
from store_steps import FILE_BYTES, put

from kvblend.store.errors import StoreWriteFailed
from kvblend.store.format import KVShape
from kvblend.store.keys import pack_ids
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample

BROKEN = OSError(errno.EIO, "Input/output error")


async def is_served(store: ChunkStore, one: Sample) -> bool:
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return False
    with lease:
        await lease.prefetch(range(4))
        return [bytes(await lease.layer(index)) for index in range(4)] == one.layers


async def test_a_delete_reaches_every_tier(open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path) -> None:
    remote = FakeRemote(shape)
    store = await open_store(tmp_path, remote=remote)
    remote.keep(sample().key, pack_ids(sample().ids), sample().layers)
    await put(store, sample())
    assert await store.delete(sample().key.id)
    assert remote.chunks == {}
    assert not await is_served(store, sample())


async def test_what_only_the_remote_tier_has_is_deleted_there(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    remote = FakeRemote(shape)
    remote.keep(sample().key, pack_ids(sample().ids), sample().layers)
    store = await open_store(tmp_path, remote=remote)
    assert [await store.delete(sample(number).key.id) for number in (0, 0, 1)] == [True, False, False]


async def test_a_delete_that_the_remote_tier_does_not_hear_of_is_said(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = FakeRemote(shape)
    store = await open_store(tmp_path, remote=remote)
    await put(store, sample())
    remote.broken = ConnectionError("gone")
    assert not await store.delete(sample().key.id)
    assert "may still be in the remote tier" in caplog.text
    assert not store.contains(sample().key)


async def test_an_evicted_chunk_is_gone_from_disk_and_memory(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, disk_bytes_budget=1 << 20)
    await put(store, sample(0), sample(1))
    assert await store._remover.evict(sample(0).key.digest)
    assert [await is_served(store, sample(number)) for number in range(2)] == [False, True]
    assert not sample(0).path(tmp_path).exists()
    assert (store.stats().chunks, store.stats().host_chunks) == (1, 1)


async def test_a_chunk_evicted_here_comes_back_from_the_remote_tier(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    remote = FakeRemote(shape)
    remote.keep(sample().key, pack_ids(sample().ids), sample().layers)
    store = await open_store(tmp_path, remote=remote)
    await put(store, sample())
    assert await store._remover.evict(sample().key.digest)
    assert await is_served(store, sample())


async def test_a_chunk_whose_file_cannot_be_removed_stays(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await open_store(tmp_path, io)
    await put(store, sample())
    io.fail("remove", BROKEN)
    assert not await store._remover.evict(sample().key.digest)
    assert await is_served(store, sample())
    assert store.stats().disk_bytes == FILE_BYTES
    assert "could not be evicted" in caplog.text


async def test_a_put_evicts_another_chunk_where_one_cannot_be_removed(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io, disk_bytes_budget=256 * 4096, disk_policy="lru")
    await put(store, *(sample(number) for number in range(51)))
    io.fail("remove", BROKEN)
    await put(store, sample(51))
    known = [store.contains(sample(number).key) for number in range(52)]
    assert known == [True, False, *[True] * 50]


async def test_a_chunk_stored_anew_while_it_is_evicted_stays(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io)
    await put(store, sample())
    async with store._shelf.lock(sample().key.digest):
        putting = asyncio.create_task(put(store, sample()))
        evicting = asyncio.create_task(store._remover.evict(sample().key.digest))
        await asyncio.sleep(0)
    await asyncio.gather(putting, evicting)
    assert store.contains(sample().key) == sample().path(tmp_path).exists()


async def test_an_unknown_chunk_is_not_evicted(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    assert not await store._remover.evict(sample().key.digest)


async def test_when_no_file_can_be_removed_a_put_fails_and_everything_stays(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io, disk_bytes_budget=256 * 4096)
    await put(store, *(sample(number) for number in range(51)))
    for _ in range(3):
        io.fail("remove", BROKEN)
    with pytest.raises(StoreWriteFailed, match="3 files could not be removed"):
        await put(store, sample(51))
    assert all([await is_served(store, sample(number)) for number in range(51)])
