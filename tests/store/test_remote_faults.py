from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import pytest
from fault_proxy import FaultProxy
from redis_server import RedisServer
from remote_rig import SHORT_S, OpenRemote, fetch, key_of, read, write

from kvblend.store import remote
from kvblend.store.errors import ChunkDamaged
from kvblend.store.remote_breaker import FAILURES_MAX
from kvblend.store.remote_link import Command, RemoteRefused, RemoteUnavailable

if TYPE_CHECKING:
    from tests.store.conftest import Make


@pytest.mark.parametrize("at_byte", [1, 1500, 5000])
async def test_a_writer_that_is_cut_off_leaves_nothing_to_be_found(
    redis_server: RedisServer, proxy: FaultProxy, open_remote: OpenRemote, sample: Make, at_byte: int
) -> None:
    tier = await open_remote(proxy.url, SHORT_S)
    await tier.fetch_header(sample().key.digest)
    proxy.request_cut_at = at_byte
    with pytest.raises(RemoteUnavailable):
        await write(tier, sample())
    # what is there was not finished, and ends by itself
    keys = redis_server.keys()
    assert key_of(sample()).encode() not in keys
    for key in keys:
        assert 0 < int(redis_server.call("TTL", key)[1:]) <= remote.UNFINISHED_TTL_S


@pytest.mark.parametrize("calls", [2, 3, 5])
async def test_an_unfinished_chunk_that_the_server_let_go_is_not_published(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    tier, one = await open_remote(redis_server.url), sample()
    monkeypatch.setattr(remote, "RUN_BYTES_MAX", 1)
    link_write = tier._link.write
    done = 0

    async def lossy_write(commands: list[Command], *, is_atomic: bool = False) -> list[object]:
        nonlocal done
        answers = await link_write(commands, is_atomic=is_atomic)
        done += 1
        if done == calls:
            await link_write([("FLUSHALL",)])
        return answers

    monkeypatch.setattr(tier._link, "write", lossy_write)
    with pytest.raises(RemoteRefused):
        await write(tier, one)
    assert await tier.fetch_header(one.key.digest) is None


async def test_a_full_server_refuses_and_reads_go_on(
    own_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier = await open_remote(own_server.url)
    await write(tier, sample(0))
    own_server.call("CONFIG", "SET", "maxmemory", "100000")
    for number in range(1, 2 + FAILURES_MAX):
        with pytest.raises(RemoteRefused):
            await write(tier, sample(number))
    assert await read(tier, await fetch(tier, sample(0))) == sample(0).layers
    assert tier.figures().bytes_budget == 100000


async def test_a_chunk_above_the_servers_memory_is_not_sent(
    own_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    own_server.call("CONFIG", "SET", "maxmemory", "1000")
    with pytest.raises(RemoteRefused, match="maxmemory is 1000"):
        await write(await open_remote(own_server.url), sample())


@pytest.mark.parametrize("fault", ["cut_at", "stall_at"])
@pytest.mark.parametrize("at_byte", [0, 3, 500, 700])
async def test_a_server_that_dies_or_stalls_within_a_layer_is_unavailable(
    proxy: FaultProxy, open_remote: OpenRemote, sample: Make, fault: str, at_byte: int
) -> None:
    tier, one = await open_remote(proxy.url, SHORT_S), sample()
    await write(tier, one)
    header = await fetch(tier, one)
    setattr(proxy, fault, at_byte)
    with pytest.raises(RemoteUnavailable):
        await read(tier, header)
    proxy.heal()
    assert await read(tier, header) == one.layers


async def test_a_byte_flipped_on_the_way_is_damage(proxy: FaultProxy, open_remote: OpenRemote, sample: Make) -> None:
    tier, one = await open_remote(proxy.url), sample()
    await write(tier, one)
    header = await fetch(tier, one)
    proxy.flip_at = 400
    with pytest.raises(ChunkDamaged, match="checksum"):
        await read(tier, header)


async def test_a_server_that_dies_is_a_miss_and_back_again_a_hit(
    own_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier = await open_remote(own_server.url)
    await write(tier, sample())
    own_server.stop()
    assert await tier.fetch_header(sample().key.digest) is None
    own_server.start()
    assert await tier.fetch_header(sample().key.digest) is None
    assert [tier.figures().errors, tier.figures().misses] == [1, 1]


async def test_a_server_that_is_down_costs_no_time_and_one_warning(
    proxy: FaultProxy, open_remote: OpenRemote, sample: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await open_remote(proxy.url, SHORT_S)
    proxy.stall_at = 0
    with caplog.at_level(logging.WARNING, "kvblend.store"):
        await asyncio.gather(*(tier.fetch_header(sample(number).key.digest) for number in range(50)))
    assert len(caplog.records) == 1
    assert tier.figures().state == "down"
    assert tier.figures().errors + tier.figures().skipped == 50
    assert tier.figures().skipped >= 40


async def test_what_a_full_server_evicts_is_a_miss_and_the_rest_is_whole(
    own_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    own_server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    own_server.call("CONFIG", "SET", "maxmemory", "6000000")
    tier, ones = await open_remote(own_server.url), [sample(number, 2000) for number in range(16)]
    for one in ones:
        # keys of one second are equally old to the server: it may let go of the very one that is being written
        with contextlib.suppress(RemoteRefused):
            await write(tier, one)
    found = [(one, header) for one in ones if (header := await tier.fetch_header(one.key.digest)) is not None]
    assert 0 < len(found) < len(ones)
    for one, header in found:
        assert await read(tier, header) == one.layers


async def test_writers_of_one_chunk_at_the_same_time_do_not_mix(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RUN_BYTES_MAX", 1)
    tiers = [await open_remote(redis_server.url) for _ in range(4)]
    variants = [sample() for _ in tiers]
    for number, one in enumerate(variants):
        for layer in one.layers:
            layer[0] = number
    await asyncio.gather(*(write(tier, one) for tier, one in zip(tiers, variants, strict=True)))
    assert await read(tiers[0], await fetch(tiers[0], sample())) in [one.layers for one in variants]
    assert len(redis_server.keys()) == 1
