"""Copies in the background: new chunks to the remote tier, fetched ones to disk."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_remote import FakeRemote
from store_steps import FILE_BYTES, keep, put, read_all

from kvblend.store import copies
from kvblend.store.format import KVShape

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore


@pytest.fixture
def remote(shape: KVShape) -> FakeRemote:
    return FakeRemote(shape)


async def test_new_chunks_reach_the_remote_tier_behind_the_callers_back(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.gate("write")
    await put(store, sample(0), sample(1))
    assert remote.chunks == {}
    assert store.stats().remote_waiting > 0
    remote.open_gate("write")
    await store.close()
    assert [remote.chunks[sample(number).key.digest][1] for number in range(2)] == [
        [bytes(layer) for layer in sample(number).layers] for number in range(2)
    ]
    assert store.stats().remote_writes == 2


async def test_a_chunk_that_left_memory_meanwhile_is_copied_from_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.gate("write")
    await put(store, sample(0), sample(1))
    assert store.evict_nowait(sample(1).key.id)
    remote.open_gate("write")
    await store.close()
    assert set(remote.chunks) == {sample(0).key.digest, sample(1).key.digest}


async def test_a_failed_copy_leaves_the_chunk_on_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.broken = TimeoutError("too slow")
    await put(store, sample())
    await store.close()
    assert (store.stats().remote_failed, store.stats().remote_writes, store.stats().pinned_bytes) == (1, 0, 0)
    assert sample().path(tmp_path).exists()


async def test_a_chunk_deleted_before_its_turn_is_not_copied(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.gate("write")
    await put(store, sample(0), sample(1))
    await remote.arrived("write")
    assert await store.delete(sample(1).key.id)
    remote.open_gate("write")
    await store.close()
    assert set(remote.chunks) == {sample(0).key.digest}


async def test_too_many_waiting_copies_are_skipped_and_counted(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "UPLOADS_MAX", 2)
    store = await open_store(tmp_path, remote=remote)
    remote.gate("write")
    await put(store, sample(0))
    await remote.arrived("write")
    await put(store, *(sample(number) for number in range(1, 5)))
    assert (store.stats().remote_waiting, store.stats().remote_skipped) == (2, 2)
    remote.open_gate("write")


async def test_a_closing_store_gives_up_what_has_not_begun(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.gate("write")
    await put(store, sample(0), sample(1), sample(2))
    await remote.arrived("write")
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    store._copies.skip_waiting()
    remote.open_gate("write")
    await closing
    assert len(remote.chunks) == 1
    assert "2 chunks were not copied" in caplog.text


async def test_a_fetched_chunk_is_written_to_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    keep(remote, sample())
    store = await open_store(tmp_path, remote=remote)
    await read_all(store, sample())
    await store.close()
    store = await open_store(tmp_path)
    assert store.stats().chunks == 1
    assert await read_all(store, sample()) == sample().layers


async def test_part_of_a_fetched_chunk_is_not_written_to_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    keep(remote, sample())
    store = await open_store(tmp_path, remote=remote)
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    with lease:
        await lease.prefetch(range(3))
    await store.close()
    assert store.stats().chunks == 0


async def test_a_fetched_chunk_without_room_on_disk_is_served_all_the_same(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    keep(remote, sample())
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=1 << 12)
    assert await read_all(store, sample()) == sample().layers
    await store.close()
    assert (store.stats().chunks, store.stats().writes_failed, store.stats().pinned_bytes) == (0, 0, 0)


async def test_a_fetched_chunk_that_cannot_be_written_is_served_all_the_same(
    open_store: OpenStore, sample: Make, remote: FakeRemote, io: FaultyIO, tmp_path: Path
) -> None:
    keep(remote, sample())
    store = await open_store(tmp_path, io, remote=remote)
    io.fail("write_file", OSError(errno.ENOSPC, "No space left on device"))
    for _ in range(2):
        assert await read_all(store, sample()) == sample().layers


async def test_few_fetched_chunks_are_held_for_their_copy(
    open_store: OpenStore, sample: Make, remote: FakeRemote, io: FaultyIO, tmp_path: Path
) -> None:
    for number in range(8):
        keep(remote, sample(number))
    store = await open_store(tmp_path, io, remote=remote)
    io.gate("write_file")
    for number in range(8):
        await read_all(store, sample(number))
    assert store.stats().pinned_bytes <= copies.FETCHED_MAX * (1 << 15)
    io.open_gate("write_file")
    await store.close()
    assert store.stats().chunks == copies.FETCHED_MAX


async def test_a_chunk_is_copied_before_it_leaves_the_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")
    await put(store, sample(0))
    await store._copies.close(0.0)
    store._copies._waiting[sample(0).key.digest] = False
    await put(store, sample(1), sample(2))
    assert not store.contains(sample(0).key)
    assert await read_all(store, sample(0)) == sample(0).layers


async def test_a_chunk_whose_copy_is_under_way_does_not_leave_the_disk_before_it(
    open_store: OpenStore, sample: Make, remote: FakeRemote, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io, remote=remote, disk_bytes_budget=1 << 20)
    remote.gate("write")
    await put(store, sample(0), sample(1))
    await remote.arrived("write")
    assert store.evict_nowait(sample(1).key.id)
    io.gate("heads_read")
    remote.open_gate("write")
    # the copy's turn has come, and its header is on its way: nothing says yet that the chunk is in use
    await io.arrived["heads_read"].acquire()
    evicting = asyncio.create_task(store._remover.evict(sample(1).key.digest))
    await asyncio.sleep(0)
    io.open_gate("heads_read")
    assert await evicting
    assert not sample(1).path(tmp_path).exists()
    assert await read_all(store, sample(1)) == sample(1).layers


async def test_a_chunk_leased_while_it_is_copied_does_not_leave_the_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=1 << 20)
    remote.gate("write")
    await put(store, sample(0), sample(1))
    await remote.arrived("write")
    assert store._copies.waiting == 1
    evicting = asyncio.create_task(store._remover.evict(sample(1).key.digest))
    lease = await store.lease(sample(1).key, sample(1).ids)
    assert lease is not None
    with lease:
        remote.open_gate("write")
        assert not await evicting
        assert store.contains(sample(1).key)
    assert await store._remover.evict(sample(1).key.digest)
    assert set(remote.chunks) == {sample(0).key.digest, sample(1).key.digest}
