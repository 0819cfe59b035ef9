from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from redis_server import RedisServer
from remote_rig import OpenRemote, fetch, key_of, read, write

from kvblend.store import remote

if TYPE_CHECKING:
    from tests.store.conftest import Make


@pytest.mark.uvloop
async def test_a_chunk_comes_back_as_it_was(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    tier, one = await open_remote(redis_server.url), sample()
    await write(tier, one)
    header = await fetch(tier, one)
    assert (header.key, header.token_ids) == (one.key, one.ids)
    assert await read(tier, header) == one.layers


async def test_another_process_finds_it(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    await write(await open_remote(redis_server.url), sample())
    other = await open_remote(redis_server.url)
    assert await read(other, await fetch(other, sample())) == sample().layers


async def test_some_layers_go_to_their_places(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    tier, one = await open_remote(redis_server.url), sample()
    await write(tier, one)
    header = await fetch(tier, one)
    data = memoryview(bytearray(header.data_bytes))
    await tier.read_layers(header, data, 1, 3)
    found = [bytes(data[span.offset : span.offset + span.length]) for span in header.layers]
    assert found == [bytes(len(one.layers[0])), *one.layers[1:3], bytes(len(one.layers[3]))]


async def test_layers_with_a_float_per_token_come_back(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier, one = await open_remote(redis_server.url), sample()
    for layer in one.layers:
        layer += bytes(range(4 * len(one.ids)))
    await write(tier, one)
    assert await read(tier, await fetch(tier, one)) == one.layers


async def test_chunks_larger_than_a_run_come_back(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sample(0, 9)
    monkeypatch.setattr(remote, "RUN_BYTES_MAX", 3 * len(one.layers[0]))
    tier = await open_remote(redis_server.url)
    await write(tier, one)
    assert await read(tier, await fetch(tier, one)) == one.layers


async def test_a_stored_chunk_is_one_whole_hash(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    await write(await open_remote(redis_server.url), sample())
    assert redis_server.keys() == [key_of(sample()).encode()]
    assert redis_server.call("HLEN", key_of(sample())) == b":6"
    assert redis_server.call("TTL", key_of(sample())) == b":-1"


async def test_a_time_to_live_is_set(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    await write(await open_remote(redis_server.url, ttl_s=5000), sample())
    assert 4000 < int(redis_server.call("TTL", key_of(sample()))[1:]) <= 5000


async def test_the_prefix_parts_users_of_one_server(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    await write(await open_remote(f"{redis_server.url}?prefix=a"), sample())
    assert await (await open_remote(f"{redis_server.url}?prefix=b")).fetch_header(sample().key.digest) is None


async def test_a_chunk_stored_anew_replaces_all_of_the_older_one(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier, one = await open_remote(redis_server.url), sample()
    await write(tier, one)
    for layer in one.layers:
        layer[:] = layer[::-1]
    await write(tier, one)
    assert await read(tier, await fetch(tier, one)) == one.layers
    assert len(redis_server.keys()) == 1


async def test_a_removed_chunk_is_gone(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    tier = await open_remote(redis_server.url)
    await write(tier, sample())
    assert [await tier.remove(sample().key.digest), await tier.remove(sample().key.digest)] == [True, False]
    assert await tier.fetch_header(sample().key.digest) is None
    assert redis_server.keys() == []


async def test_figures_count_what_happened(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    tier, one = await open_remote(redis_server.url), sample(0, 300)
    assert tier.figures().state == "idle"
    await write(tier, one)
    await read(tier, await fetch(tier, one))
    await tier.fetch_header(sample(5).key.digest)
    await tier.remove(one.key.digest)
    figures = tier.figures()
    assert (figures.state, figures.hits, figures.misses, figures.writes, figures.removed) == ("up", 1, 1, 1, 1)
    assert (figures.bytes_read, figures.bytes_written) == (one.num_bytes, one.num_bytes)
    assert figures.latency_ms > 0
    assert figures.read_mb_s > 0
    assert figures.bytes_used > 0


async def test_a_header_asked_for_measuring_is_no_look_up(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier = await open_remote(redis_server.url)
    await write(tier, sample())
    for number in range(2):
        await tier.fetch_header(sample(number).key.digest, counted=False)
    figures = tier.figures()
    assert (figures.hits, figures.misses) == (0, 0)
    assert figures.latency_ms > 0


async def test_a_closed_tier_is_a_miss(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    tier = await open_remote(redis_server.url)
    await write(tier, sample())
    await tier.close()
    assert await tier.fetch_header(sample().key.digest) is None
    assert tier.figures().state == "closed"


@pytest.mark.parametrize(
    ("name", "value"), [("timeout_s", 0.0), ("timeout_s", 1e9), ("timeout_s", float("nan")), ("ttl_s", -1)]
)
async def test_a_limit_out_of_range_is_refused_by_name(open_remote: OpenRemote, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        await open_remote("redis://h", **{name: value})


async def test_a_bad_url_is_refused(open_remote: OpenRemote) -> None:
    with pytest.raises(ValueError, match="remote"):
        await open_remote("http://h")
