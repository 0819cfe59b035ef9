"""Random lives of two stores and the server between them: what is served is right, and all else is a miss."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fault_proxy import FaultProxy
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import RedisServer
from remote_rig import key_of

from kvblend.store.errors import ChunkDamaged, ForeignFile
from kvblend.store.format import KVShape, build_header, checksum
from kvblend.store.keys import pack_ids
from kvblend.store.remote import RemoteTier, _place
from kvblend.store.remote_address import RemoteAddress
from kvblend.store.remote_link import RedisLink
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import Make, Sample

CHUNKS = 3
TIMEOUT_S = 0.05
FAULTS = ("cut_at", "stall_at", "flip_at", "request_cut_at")
ACTIONS = ("put", "put", "read", "read", "read", "evict", "delete", "move", "fault", "heal", "heal", "spoil", "lose")

steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9999)), max_size=14)


class Lives:
    """Stores A and B with a folder each, and a way to the server that can be made to fail."""

    def __init__(self, folder: Path, samples: list[Sample], shape: KVShape, server: RedisServer, url: str) -> None:
        self.folder = folder
        self.samples = samples
        self.shape = shape
        self.server = server
        self.url = url
        self.stores: list[ChunkStore] = []
        self.moves = itertools.count()

    async def open(self) -> ChunkStore:
        # a clock that runs away: the server is never left alone for long
        clock = itertools.count(0, 1000)
        link = RedisLink(RemoteAddress.parse(self.url), TIMEOUT_S, lambda: float(next(clock)))
        remote = RemoteTier(link, self.shape, "model-a")
        root = self.folder / str(next(self.moves))
        return await ChunkStore.open(root, self.shape, "model-a", 1 << 20, remote=remote)

    async def put(self, pick: int) -> None:
        one = self.samples[pick % CHUNKS]
        await self.stores[pick % 2].put(one.key, one.ids, [bytearray(layer) for layer in one.layers])

    async def read(self, pick: int) -> None:
        one = self.samples[pick % CHUNKS]
        lease = await self.stores[pick % 2].lease(one.key, one.ids)
        if lease is None:
            return
        with lease:
            try:
                await lease.prefetch(range(pick % 4, 4))
                got = [bytes(await lease.layer(index)) for index in range(4)]
            except ChunkDamaged:
                return
        assert got == one.layers

    async def evict(self, pick: int) -> None:
        self.stores[pick % 2].evict_nowait(self.samples[pick % CHUNKS].key.id)

    async def delete(self, pick: int) -> None:
        await self.stores[pick % 2].delete(self.samples[pick % CHUNKS].key.id)

    async def move(self, pick: int) -> None:
        """Close a store, and open one with an empty folder in its place."""
        await self.stores[pick % 2].close()
        self.stores[pick % 2] = await self.open()

    async def spoil(self, pick: int) -> None:
        field = ("header", "size", "0", "3")[pick % 4]
        self.server.call("HSET", key_of(self.samples[pick % CHUNKS]), field, str(pick))

    async def lose(self, pick: int) -> None:
        self.server.call("HDEL", key_of(self.samples[pick % CHUNKS]), str(pick % 4))


async def live(lives: Lives, proxy: FaultProxy, steps: list[tuple[str, int]]) -> None:
    lives.stores = [await lives.open(), await lives.open()]
    try:
        for action, pick in steps:
            if action == "fault":
                setattr(proxy, FAULTS[pick % len(FAULTS)], pick % 6000)
            elif action == "heal":
                proxy.heal()
            else:
                await getattr(lives, action)(pick)
        proxy.heal()
        for number in range(CHUNKS):
            await lives.put(number)
            await lives.read(number)
    finally:
        proxy.heal()
        for store in lives.stores:
            await store.close()


@settings(max_examples=15)
@given(steps)
def test_whatever_the_server_does_what_is_served_is_right(
    sample: Make, shape: KVShape, shared_redis_server: RedisServer, steps: list[tuple[str, int]]
) -> None:
    samples = [sample(number) for number in range(CHUNKS)]
    shared_redis_server.call("FLUSHALL")

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with FaultProxy(shared_redis_server.path) as proxy:
                await live(Lives(Path(folder), samples, shape, shared_redis_server, proxy.url), proxy, steps)

    asyncio.run(main())


answers = st.recursive(
    st.none() | st.integers() | st.binary(max_size=80) | st.builds(RuntimeError),
    lambda inner: st.lists(inner),
    max_leaves=8,
)


@given(answers)
async def test_no_answer_passes_for_a_chunk(sample: Make, shape: KVShape, answer: Any) -> None:
    one = sample()
    tier = RemoteTier(RedisLink(RemoteAddress.parse("redis://h"), 1.0), shape, "model-a")
    try:
        assert tier._parse(one.key.digest, answer) is None
        assert answer == [None, None]
    except (ChunkDamaged, ForeignFile):
        pass
    await tier.close()


@given(answers)
def test_no_answer_passes_for_layers(sample: Make, shape: KVShape, answer: Any) -> None:
    one = sample()
    header, _ = build_header(one.key, pack_ids(one.ids), shape, [checksum(layer) for layer in one.layers])
    try:
        _place(answer, header.layers[:2], memoryview(bytearray(header.data_bytes)), 0)
    except ChunkDamaged:
        return
    raise AssertionError("it was taken for layers")


@given(st.data())
async def test_a_header_with_any_byte_changed_is_not_taken(sample: Make, shape: KVShape, data: st.DataObject) -> None:
    one = sample()
    header, region = build_header(one.key, pack_ids(one.ids), shape, [checksum(layer) for layer in one.layers])
    at = data.draw(st.integers(0, len(region) - 1))
    changed = region[:at] + bytes([region[at] ^ data.draw(st.integers(1, 255))]) + region[at + 1 :]
    tier = RemoteTier(RedisLink(RemoteAddress.parse("redis://h"), 1.0), shape, "model-a")
    size = str(header.file_bytes).encode()
    assert tier._parse(one.key.digest, [region, size]) == header
    try:
        tier._parse(one.key.digest, [changed, size])
    except (ChunkDamaged, ForeignFile):
        await tier.close()
        return
    raise AssertionError("it was taken")
