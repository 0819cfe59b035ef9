"""Remote tiers for tests, with chunks to write to them; as a pytest plugin it brings `open_remote` and `proxy`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import pytest
from fault_proxy import FaultProxy
from redis_server import RedisServer

from kvblend.store.format import ChunkHeader, KVShape
from kvblend.store.keys import ChunkKey, pack_ids
from kvblend.store.remote import RemoteTier

SHORT_S = 0.1
"""A time limit for operations that are meant to fail."""
OpenRemote = Callable[..., Awaitable[RemoteTier]]


class Chunk(Protocol):
    """What a test has of a chunk."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def key(self) -> ChunkKey: ...

    @property
    def layers(self) -> list[bytearray]: ...


def key_of(one: Chunk) -> str:
    return f"kvblend:{one.key.id}"


async def write(tier: RemoteTier, one: Chunk) -> None:
    await tier.write(one.key, pack_ids(one.ids), [memoryview(layer) for layer in one.layers])


async def fetch(tier: RemoteTier, one: Chunk) -> ChunkHeader:
    header = await tier.fetch_header(one.key.digest)
    if header is None:
        raise AssertionError("the chunk is not there")
    return header


async def read(tier: RemoteTier, header: ChunkHeader) -> list[bytes]:
    data = memoryview(bytearray(header.data_bytes))
    await tier.read_layers(header, data, 0, len(header.layers))
    return [bytes(data[span.offset : span.offset + span.length]) for span in header.layers]


@pytest.fixture
async def open_remote(shape: KVShape) -> AsyncIterator[OpenRemote]:
    """Opens tiers with the samples' shape and model, and closes them at the end."""
    tiers: list[RemoteTier] = []

    async def open_one(
        url: str, timeout_s: float = 5.0, shape: KVShape = shape, fingerprint: str = "model-a", ttl_s: int = 0
    ) -> RemoteTier:
        tiers.append(await RemoteTier.open(url, shape, fingerprint, timeout_s=timeout_s, ttl_s=ttl_s))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        await tier.close()


@pytest.fixture
async def proxy(redis_server: RedisServer) -> AsyncIterator[FaultProxy]:
    """A way to `redis_server` that can be made to fail."""
    async with FaultProxy(redis_server.path) as proxy:
        yield proxy
