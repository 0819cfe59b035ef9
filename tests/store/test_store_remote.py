"""Two stores that know each other only through a remote tier on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_proxy import FaultProxy, GarbageServer
from redis_server import RedisServer
from remote_rig import SHORT_S, key_of

from kvblend.store.errors import ChunkDamaged
from kvblend.store.format import KVShape
from kvblend.store.keys import tenant_of
from kvblend.store.remote import RemoteTier
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import Make, Sample

Open = Callable[..., Awaitable[ChunkStore]]


@pytest.fixture
async def open_with_remote(shape: KVShape) -> AsyncIterator[Open]:
    """Opens stores with a remote tier and closes them at the end."""
    stores: list[ChunkStore] = []

    async def open_one(root: Path | None, url: str, timeout_s: float = 5.0, budget: int = 1 << 20) -> ChunkStore:
        remote = await RemoteTier.open(url, shape, "model-a", timeout_s=timeout_s)
        stores.append(await ChunkStore.open(root, shape, "model-a", budget, remote=remote))
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


async def put(store: ChunkStore, *samples: Sample) -> None:
    for one in samples:
        assert await store.put(one.key, one.ids, one.layers)


async def read(store: ChunkStore, one: Sample) -> tuple[str, list[bytearray]] | None:
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return None
    with lease:
        await lease.prefetch(range(len(one.layers)))
        return lease.tier, [bytearray(await lease.layer(index)) for index in range(len(one.layers))]


async def fill(open_with_remote: Open, root: Path, url: str, *samples: Sample) -> None:
    """Put chunks into the remote tier by way of a store that is gone afterwards."""
    store = await open_with_remote(root, url)
    await put(store, *samples)
    await store.close()


async def test_what_one_store_put_another_one_gets(
    redis_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    await fill(open_with_remote, tmp_path / "a", redis_server.url, sample())
    other = await open_with_remote(tmp_path / "b", redis_server.url)
    assert await read(other, sample()) == ("remote", sample().layers)
    assert await read(other, sample()) == ("host", sample().layers)
    assert other.stats().hits_remote == 1


async def test_a_fetched_chunk_is_kept_on_disk(
    redis_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    await fill(open_with_remote, tmp_path / "a", redis_server.url, sample())
    other = await open_with_remote(tmp_path / "b", redis_server.url)
    await read(other, sample())
    await other.close()
    redis_server.call("FLUSHALL")
    again = await open_with_remote(tmp_path / "b", redis_server.url)
    assert await read(again, sample()) == ("disk", sample().layers)


async def test_a_store_without_a_folder_shares_chunks(
    redis_server: RedisServer, open_with_remote: Open, sample: Make
) -> None:
    first, second = [await open_with_remote(None, redis_server.url) for _ in range(2)]
    await put(first, sample())
    assert await read(second, sample()) == ("remote", sample().layers)


async def test_a_store_without_a_folder_finds_again_what_it_evicted(
    redis_server: RedisServer, open_with_remote: Open, sample: Make
) -> None:
    store = await open_with_remote(None, redis_server.url)
    await put(store, sample())
    assert store.evict_nowait(sample().key.id)
    assert await read(store, sample()) == ("remote", sample().layers)


async def test_a_deleted_chunk_is_gone_for_all(
    redis_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    await fill(open_with_remote, tmp_path / "a", redis_server.url, sample())
    store = await open_with_remote(tmp_path / "a", redis_server.url)
    assert await store.delete(sample().key.id)
    assert redis_server.keys() == []
    assert await read(store, sample()) is None


async def test_a_fetched_chunk_counts_once_for_all_who_ask(
    redis_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    await fill(open_with_remote, tmp_path / "a", redis_server.url, sample())
    async with FaultProxy(redis_server.path) as proxy:
        other = await open_with_remote(tmp_path / "b", proxy.url)
        found = await asyncio.gather(*(read(other, sample()) for _ in range(8)))
        assert [layers for _, layers in filter(None, found)] == 8 * [sample().layers]
        assert other.stats().layers_read == len(sample().layers)


@pytest.mark.parametrize("fault", ["cut_at", "stall_at"])
async def test_a_remote_tier_that_fails_within_a_layer_is_a_miss_and_no_more(
    redis_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path, fault: str
) -> None:
    await fill(open_with_remote, tmp_path / "a", redis_server.url, sample())
    async with FaultProxy(redis_server.path) as proxy:
        store = await open_with_remote(tmp_path / "b", proxy.url, SHORT_S)
        lease = await store.lease(sample().key, sample().ids)
        assert lease is not None
        setattr(proxy, fault, 400)
        with lease, pytest.raises(ChunkDamaged):
            await lease.prefetch(range(4))
        proxy.heal()
        # the copy there is a good one and stays
        assert await read(store, sample()) == ("remote", sample().layers)


async def test_a_damaged_copy_is_a_miss_and_can_be_stored_anew(
    redis_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    await fill(open_with_remote, tmp_path / "a", redis_server.url, sample())
    redis_server.call("HSET", key_of(sample()), "1", "x")
    store = await open_with_remote(tmp_path / "b", redis_server.url)
    with pytest.raises(ChunkDamaged):
        await read(store, sample())
    await put(store, sample())
    assert await read(store, sample()) == ("host", sample().layers)
    await store.close()
    assert redis_server.keys() == [key_of(sample()).encode()]


async def test_a_server_that_is_gone_costs_nothing_but_its_chunks(
    own_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    store = await open_with_remote(tmp_path / "a", own_server.url)
    await put(store, sample(0))
    own_server.stop()
    for number in range(1, 6):
        assert await read(store, sample(number)) is None
        await put(store, sample(number))
        assert await read(store, sample(number)) == ("host", sample(number).layers)
    assert await read(store, sample(0)) == ("host", sample(0).layers)


async def test_without_a_folder_and_without_the_server_memory_still_serves(
    own_server: RedisServer, open_with_remote: Open, sample: Make
) -> None:
    store = await open_with_remote(None, own_server.url)
    own_server.stop()
    await put(store, sample())
    assert await read(store, sample()) == ("host", sample().layers)


async def test_a_server_that_is_no_such_server_is_a_miss(open_with_remote: Open, sample: Make, tmp_path: Path) -> None:
    async with GarbageServer(b"*2\r\n$3\r\nabc\r\n$2\r\n17\r\n") as server:
        store = await open_with_remote(tmp_path, server.url, SHORT_S)
        assert await read(store, sample()) is None
        await put(store, sample())
        await store.close()


async def test_another_tenants_chunk_is_not_found(
    redis_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    one = sample()
    await fill(open_with_remote, tmp_path / "a", redis_server.url, one)
    other = await open_with_remote(tmp_path / "b", redis_server.url)
    key = type(one.key)(one.key.fingerprint, tenant_of("another"), one.key.conditioning, one.key.content)
    assert await other.lease(key, one.ids) is None


async def test_a_server_killed_between_header_and_layers_is_a_miss(
    own_server: RedisServer, open_with_remote: Open, sample: Make, tmp_path: Path
) -> None:
    await fill(open_with_remote, tmp_path / "a", own_server.url, sample())
    store = await open_with_remote(tmp_path / "b", own_server.url)
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    await lease.layer(0)
    own_server.stop()
    with lease, pytest.raises(ChunkDamaged):
        await lease.prefetch(range(4))
    await put(store, sample())
    assert await read(store, sample()) == ("host", sample().layers)
