"""A remote tier in this process, with gates and planted failures, for tests of what the store does around one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvblend.store.errors import ChunkDamaged
from kvblend.store.format import ChunkHeader, KVShape, build_header, checksum
from kvblend.store.keys import ChunkKey
from kvblend.store.remote_stats import RemoteCounts, RemoteFigures
from kvblend.store.tiers import LayerRun, read_side_by_side


class FakeRemote:
    """Keeps chunks in a dict. `broken` makes every call raise; `gate` holds calls of one name until it is opened."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.chunks: dict[bytes, tuple[ChunkHeader, list[bytes]]] = {}
        self.calls: list[str] = []
        self.lookups = 0
        self.broken: Exception | None = None
        self.closed = False
        self._gates: dict[str, asyncio.Event] = {}
        self._arrived: dict[str, asyncio.Event] = {}

    def gate(self, name: str) -> None:
        self._gates[name], self._arrived[name] = asyncio.Event(), asyncio.Event()

    def open_gate(self, name: str) -> None:
        self._gates.pop(name).set()

    async def arrived(self, name: str) -> None:
        await self._arrived[name].wait()

    async def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self._gates:
            self._arrived[name].set()
            await self._gates[name].wait()
        if self.broken is not None:
            raise self.broken

    def keep(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[bytes | bytearray | memoryview]) -> None:
        copies = [bytes(layer) for layer in layers]
        header, _ = build_header(key, packed_ids, self.shape, [checksum(one) for one in copies], len(copies[0]))
        self.chunks[key.digest] = header, copies

    async def fetch_header(self, digest: bytes, *, counted: bool = True) -> ChunkHeader | None:
        await self._enter("fetch_header")
        self.lookups += counted
        found = self.chunks.get(digest)
        return None if found is None else found[0]

    async def read_layers(self, header: ChunkHeader, data: memoryview, first: int, stop: int) -> None:
        await self._enter("read_layers")
        found = self.chunks.get(header.key.digest)
        if found is None:
            raise ChunkDamaged("a layer is not there any more")
        for span, layer in zip(header.layers[first:stop], found[1][first:stop], strict=True):
            if checksum(layer) != span.checksum:
                raise ChunkDamaged("the checksum of a layer does not match")
            data[span.offset : span.offset + span.length] = layer

    async def read_runs(self, runs: Sequence[LayerRun]) -> list[Exception | None]:
        return await read_side_by_side(self, runs)

    async def write(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview]) -> None:
        await self._enter("write")
        self.keep(key, packed_ids, layers)

    async def remove(self, digest: bytes) -> None:
        await self._enter("remove")
        self.chunks.pop(digest, None)

    def figures(self) -> RemoteFigures:
        return RemoteCounts().figures("up")

    async def close(self) -> None:
        self.closed = True
