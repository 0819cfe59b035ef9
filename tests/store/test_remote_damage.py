from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from fault_proxy import GarbageServer
from redis_server import RedisServer
from remote_rig import SHORT_S, OpenRemote, fetch, key_of, read, write

from kvblend.store.errors import ChunkDamaged
from kvblend.store.format import KVShape, build_header, checksum
from kvblend.store.keys import pack_ids
from kvblend.store.remote_link import RemoteRefused, RemoteUnavailable

if TYPE_CHECKING:
    from tests.store.conftest import Make, Sample


def spoil(server: RedisServer, one: Sample, how: str) -> None:
    key = key_of(one)
    header = server.call("HGET", key, "header").partition(b"\r\n")[2]
    match how:
        case "text":
            server.call("SET", key, "not a hash")
        case "no size":
            server.call("HDEL", key, "size")
        case "no header":
            server.call("HDEL", key, "header")
        case "size":
            server.call("HSET", key, "size", "17")
        case "size text":
            server.call("HSET", key, "size", "-x")
        case "short header":
            server.call("HSET", key, "header", header[:-1])
        case "flipped header":
            server.call("HSET", key, "header", header[:100] + bytes([header[100] ^ 1]) + header[101:])
        case "version":
            server.call("HSET", key, "header", header[:8] + b"\x63" + header[9:])


@pytest.mark.parametrize("how", ["text", "no size", "no header", "size", "size text", "short header", "flipped header"])
async def test_a_spoiled_header_is_a_miss_and_removed(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make, how: str
) -> None:
    tier = await open_remote(redis_server.url)
    await write(tier, sample())
    spoil(redis_server, sample(), how)
    assert await tier.fetch_header(sample().key.digest) is None
    assert redis_server.keys() == []
    assert tier.figures().damaged == 1


async def test_another_format_version_is_a_miss_and_left_alone(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier = await open_remote(redis_server.url)
    await write(tier, sample())
    spoil(redis_server, sample(), "version")
    assert await tier.fetch_header(sample().key.digest) is None
    assert redis_server.keys() == [key_of(sample()).encode()]


async def test_a_chunk_under_the_wrong_key_is_a_miss_and_removed(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier = await open_remote(redis_server.url)
    await write(tier, sample(0))
    redis_server.call("RENAME", key_of(sample(0)), key_of(sample(1)))
    assert await tier.fetch_header(sample(1).key.digest) is None
    assert redis_server.keys() == []


async def test_another_shape_is_a_miss_and_removed(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    other = KVShape(2, 2, 4, "float32")
    await write(await open_remote(redis_server.url, shape=other), sample(shape=other))
    assert await (await open_remote(redis_server.url)).fetch_header(sample().key.digest) is None
    assert redis_server.keys() == []


async def test_another_model_is_a_miss(redis_server: RedisServer, open_remote: OpenRemote, sample: Make) -> None:
    await write(await open_remote(redis_server.url), sample())
    other = await open_remote(redis_server.url, fingerprint="model-b")
    assert await other.fetch_header(sample().key.digest) is None


@pytest.mark.parametrize("how", ["gone", "short", "long", "flipped", "text"])
async def test_a_spoiled_layer_is_damage_and_the_chunk_is_removed(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make, how: str
) -> None:
    tier, one = await open_remote(redis_server.url), sample()
    await write(tier, one)
    header = await fetch(tier, one)
    key, layer = key_of(one), one.layers[2]
    match how:
        case "gone":
            redis_server.call("HDEL", key, "2")
        case "short":
            redis_server.call("HSET", key, "2", bytes(layer[:-1]))
        case "long":
            redis_server.call("HSET", key, "2", bytes(layer) + b"\0")
        case "flipped":
            redis_server.call("HSET", key, "2", bytes([layer[0] ^ 1]) + bytes(layer[1:]))
        case "text":
            redis_server.call("SET", key, "not a hash")
    with pytest.raises(ChunkDamaged):
        await read(tier, header)
    assert redis_server.keys() == []


async def test_a_chunk_stored_anew_while_it_is_read_is_not_removed(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier, one = await open_remote(redis_server.url), sample()
    await write(tier, one)
    header = await fetch(tier, one)
    for layer in one.layers:
        layer[:] = layer[::-1]
    await write(tier, one)
    with pytest.raises(RemoteUnavailable, match="anew"):
        await read(tier, header)
    assert await read(tier, await fetch(tier, one)) == one.layers


async def test_a_chunk_that_went_while_it_is_read_is_unavailable(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make
) -> None:
    tier = await open_remote(redis_server.url)
    await write(tier, sample())
    header = await fetch(tier, sample())
    redis_server.call("FLUSHALL")
    with pytest.raises(RemoteUnavailable):
        await read(tier, header)


@pytest.mark.parametrize(
    "answer",
    [
        b"*2\r\n$3\r\nabc\r\n$2\r\n17\r\n",
        b"*2\r\n*0\r\n:4\r\n",
        b"*0\r\n",
        b"*2\r\n$-1\r\n$-1\r\n",
        b":7\r\n",
        b"+OK\r\n",
        b"$3\r\nabc\r\n",
        b"*2\r\n-ERR a\r\n-ERR b\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\xff" * 70000,
    ],
)  # fmt: skip
async def test_garbage_is_a_miss_everywhere(open_remote: OpenRemote, sample: Make, answer: bytes) -> None:
    async with GarbageServer(answer) as server:
        tier, one = await open_remote(server.url, SHORT_S), sample()
        header, _ = build_header(one.key, pack_ids(one.ids), tier._shape, [checksum(layer) for layer in one.layers])
        assert await tier.fetch_header(one.key.digest) is None
        with pytest.raises((ChunkDamaged, RemoteUnavailable)):
            await read(tier, header)
        with pytest.raises((RemoteRefused, RemoteUnavailable)):
            await write(tier, one)


async def test_damage_is_told_once_as_a_warning(
    redis_server: RedisServer, open_remote: OpenRemote, sample: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await open_remote(redis_server.url)
    with caplog.at_level(logging.WARNING, "kvblend.store"):
        for number in range(3):
            redis_server.call("SET", key_of(sample(number)), "text")
            await tier.fetch_header(sample(number).key.digest)
    assert len(caplog.records) == 1
