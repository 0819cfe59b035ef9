"""Reading a few chunks to see how fast a tier is."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import TYPE_CHECKING

from fake_remote import FakeRemote

from kvblend.store import probing
from kvblend.store.format import KVShape
from kvblend.store.keys import pack_ids
from kvblend.store.probing import Reading
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore

LONG_S = 60.0


async def put(store: ChunkStore, sample: Make, count: int) -> None:
    for number in range(count):
        one = sample(number)
        await store.put(one.key, one.ids, one.layers)


async def readings(store: ChunkStore, seconds: float = LONG_S) -> list[Reading]:
    return [reading async for reading in store.probe(seconds)]


async def test_few_chunks_are_read_whole_from_each_tier(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    remote = FakeRemote(shape)
    store = await open_store(tmp_path, remote=remote)
    await put(store, sample, probing.CHUNKS_MAX + 2)
    await store.close()
    store = await open_store(tmp_path, remote=(again := FakeRemote(shape)))
    again.chunks = remote.chunks
    found = await readings(store)
    assert [one.tier for one in found] == ["disk"] * probing.CHUNKS_MAX + ["remote"] * probing.CHUNKS_MAX
    assert {one.num_bytes for one in found} == {sample().num_bytes}
    assert all(one.latency_s >= 0 and one.ended_s >= one.began_s for one in found)
    assert (store.stats().host_chunks, store.stats().misses) == (0, 0)
    assert again.lookups == 0


async def test_a_store_without_chunks_asks_nobody(open_store: OpenStore, shape: KVShape, tmp_path: Path) -> None:
    remote = FakeRemote(shape)
    assert await readings(await open_store(tmp_path, remote=remote)) == []
    assert remote.calls == []


async def test_a_remote_tier_that_has_none_is_asked_once(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    store = await open_store(tmp_path)
    await put(store, sample, 3)
    await store.close()
    remote = FakeRemote(shape)
    found = await readings(await open_store(tmp_path, remote=remote))
    assert {one.tier for one in found} == {"disk"}
    assert remote.calls == ["fetch_header"]


async def test_what_cannot_be_read_ends_the_look_and_nothing_else(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io)
    await put(store, sample, 2)
    io.fail("read_into", OSError(errno.EIO, "Input/output error"))
    assert await readings(store) == []
    assert (store.stats().chunks, store.stats().damaged) == (2, 0)


async def test_a_disk_that_hangs_is_left_alone_in_time(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io)
    await put(store, sample, 2)
    io.gate("read_into")
    assert await asyncio.wait_for(readings(store, 0.01), LONG_S) == []
    io.open_gate("read_into")


async def test_a_remote_chunk_of_this_process_is_read_as_well(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    remote = FakeRemote(shape)
    remote.keep(sample().key, pack_ids(sample().ids), sample().layers)
    store = await open_store(tmp_path, remote=remote)
    await put(store, sample, 1)
    assert [one.tier for one in await readings(store)] == ["disk", "remote"]
