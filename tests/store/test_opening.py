"""Chunks that have to be fetched first: from disk, and where the disk has none or a bad one, from the remote tier."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_remote import FakeRemote

from kvblend.store.errors import ChunkDamaged
from kvblend.store.format import KVShape
from kvblend.store.keys import pack_ids
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Flip, Make, OpenStore, Sample


@pytest.fixture
def remote(shape: KVShape, sample: Make) -> FakeRemote:
    """A remote tier that has the first sample."""
    made = FakeRemote(shape)
    made.keep(sample().key, pack_ids(sample().ids), sample().layers)
    return made


async def read(store: ChunkStore, one: Sample) -> list[bytearray] | None:
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return None
    with lease:
        await lease.prefetch(range(4))
        return [bytearray(await lease.layer(index)) for index in range(4)]


@pytest.mark.parametrize("has_folder", [True, False])
async def test_a_chunk_that_only_the_remote_tier_has_is_served(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path, has_folder: bool
) -> None:
    store = await open_store(tmp_path if has_folder else None, remote=remote)
    assert not store.contains(sample().key)
    assert await read(store, sample()) == sample().layers
    assert store.contains(sample().key)


async def test_what_is_known_here_is_not_asked_of_the_remote_tier(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    await store.put(sample().key, sample().ids, sample().layers)
    store.evict_nowait(sample().key.id)
    for _ in range(2):
        assert await read(store, sample()) == sample().layers
    assert "fetch_header" not in remote.calls


async def test_one_question_to_the_remote_tier_serves_all_who_ask(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.gate("fetch_header")
    reads = [asyncio.create_task(read(store, sample())) for _ in range(5)]
    await remote.arrived("fetch_header")
    reads.pop().cancel()
    remote.open_gate("fetch_header")
    assert await asyncio.gather(*reads) == [sample().layers] * 4
    assert remote.calls.count("fetch_header") == remote.calls.count("read_layers") == 1


async def test_what_nobody_has_is_a_miss(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    assert await read(store, sample(1)) is None
    assert store.stats().remote_failed == 0


async def test_a_remote_tier_that_cannot_be_asked_is_a_miss(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.broken = ConnectionError("gone")
    assert await read(store, sample()) is None
    assert store.stats().remote_failed == 1
    remote.broken = None
    assert await read(store, sample()) == sample().layers


async def test_another_chunks_header_is_a_miss(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    remote.chunks[sample(1).key.digest] = remote.chunks[sample().key.digest]
    store = await open_store(tmp_path, remote=remote)
    assert await read(store, sample(1)) is None


async def test_another_shapes_header_is_a_miss(
    open_store: OpenStore, sample: Make, remote: FakeRemote, shape: KVShape, tmp_path: Path
) -> None:
    header, layers = remote.chunks[sample().key.digest]
    remote.chunks[sample().key.digest] = replace(header, shape=replace(shape, dtype="bfloat16")), layers
    store = await open_store(tmp_path, remote=remote)
    assert await read(store, sample()) is None


async def test_a_chunk_whose_file_is_damaged_comes_from_the_remote_tier(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path, flip_byte: Flip
) -> None:
    store = await open_store(tmp_path, remote=remote)
    await store.put(sample().key, sample().ids, sample().layers)
    store.evict_nowait(sample().key.id)
    flip_byte(sample().path(tmp_path), 60)
    assert await read(store, sample()) == sample().layers
    assert store.stats().damaged == 1


async def test_a_remote_tier_that_dies_in_the_middle_of_a_chunk_is_a_miss(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    with lease:
        first = bytes(await lease.layer(0))
        remote.broken = ConnectionError("gone")
        with pytest.raises(ChunkDamaged, match="gone"):
            await lease.layer(1)
        assert bytes(await lease.layer(0)) == first
    assert not store.contains(sample().key)
    assert store.stats().pinned_bytes == store.stats().leases == 0


async def test_a_damaged_copy_is_removed_from_the_remote_tier(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    remote.chunks[sample().key.digest][1][2] = b"rotten"
    store = await open_store(tmp_path, remote=remote)
    with pytest.raises(ChunkDamaged):
        await read(store, sample())
    await store.close()
    assert remote.chunks == {}


async def test_a_chunk_deleted_while_the_remote_tier_is_asked_is_a_miss(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote)
    remote.gate("fetch_header")
    reading = asyncio.create_task(read(store, sample()))
    await remote.arrived("fetch_header")
    deleting = asyncio.create_task(store.delete(sample().key.id))
    await asyncio.sleep(0)
    remote.open_gate("fetch_header")
    assert await deleting
    assert await reading is None
    assert remote.chunks == {}


@pytest.mark.parametrize("turns", range(5))
async def test_a_chunk_replaced_just_when_its_header_came_is_not_lost(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, turns: int
) -> None:
    store, one = await open_store(tmp_path, io), sample()
    await store.put(one.key, one.ids, one.layers)
    store.evict_nowait(one.key.id)
    io.gate("heads_read")
    leasing = asyncio.create_task(store.lease(one.key, one.ids))
    await io.arrived["heads_read"].acquire()
    io.open_gate("heads_read")
    # at one of these turns the header is there, and who waits for it does not know yet
    for _ in range(turns):
        await asyncio.sleep(0)
    assert await store.delete(one.key.id)
    assert await store.put(one.key, one.ids, one.layers)
    lease = await leasing
    if lease is not None:
        lease.release()
    assert one.path(tmp_path).exists()


@pytest.mark.parametrize("call", ["read_heads", "read_into"])
async def test_a_chunk_is_not_given_up_where_the_process_has_no_file_left_to_open(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, call: str
) -> None:
    store = await open_store(tmp_path, io)
    await store.put(sample().key, sample().ids, sample().layers)
    store.evict_nowait(sample().key.id)
    io.fail(call, OSError(errno.EMFILE, "Too many open files"))
    with contextlib.suppress(ChunkDamaged):
        assert await read(store, sample()) is None
    assert await read(store, sample()) == sample().layers
    assert store.stats().damaged == 0


async def test_the_token_ids_of_a_remote_chunk_are_found(
    open_store: OpenStore, sample: Make, remote: FakeRemote
) -> None:
    store = await open_store(None, remote=remote)
    assert await store.token_ids(sample().key.id) == sample().ids
    assert await store.token_ids(sample(1).key.id) is None


async def test_an_index_that_is_wrong_about_a_file_is_put_right(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io)
    await store.put(sample().key, sample().ids, sample().layers)
    store.evict_nowait(sample().key.id)
    size = store.stats().disk_bytes
    row = store._shelf.index.get(sample().key.digest)
    assert row is not None
    store._shelf._unlist_row(sample().key.digest)
    row.file_bytes = 1
    store._shelf.enlist(sample().key.digest, row)
    assert await read(store, sample()) == sample().layers
    assert store.stats().disk_bytes == size
