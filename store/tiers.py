"""Where a chunk can be kept below host memory: what such a place must be able to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from kvblend.store.format import ChunkHeader
from kvblend.store.keys import ChunkKey
from kvblend.store.remote_stats import RemoteFigures

Tier = Literal["host", "disk", "remote"]


class LayerRun(NamedTuple):
    """Layers `first..stop-1` of one chunk, and `data` (`header.data_bytes` long) that they have their places in."""

    header: ChunkHeader
    data: memoryview
    first: int
    stop: int


class LayerSource(Protocol):
    """Something that chunks' layers are read from."""

    async def read_layers(self, header: ChunkHeader, data: memoryview, first: int, stop: int) -> None:
        """Read layers `first..stop-1` into their places in `data` (`header.data_bytes` long) and verify them.

        May raise anything; the chunk is a miss then. ChunkDamaged says that the copy is of no use to anybody.
        """

    async def read_runs(self, runs: Sequence[LayerRun]) -> list[Exception | None]:
        """`read_layers` for each run, together where that is cheaper; what went wrong with each, None for nothing."""


class LowerTier(LayerSource, Protocol):
    """A whole place for chunks, reached over a network: the store asks it last and writes to it behind the caller's
    back. Every method has a time limit of its own, and a failure is never more than a miss.
    """

    async def fetch_header(self, digest: bytes, *, counted: bool = True) -> ChunkHeader | None:
        """The header of a chunk, verified; None where there is none, or it cannot be had.

        Where it is asked for measuring only, it is not to be `counted` as a look-up.
        """

    async def write(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview]) -> object:
        """Keep a chunk. Raises where it could not be kept."""

    async def remove(self, digest: bytes) -> object:
        """Remove a chunk; one that is not there is no error. Raises where it may still be there."""

    def figures(self) -> RemoteFigures:
        """The state of this moment and the counts since it was opened."""

    async def close(self) -> None:
        """End what is running and give connections back."""


async def read_side_by_side(source: LayerSource, runs: Sequence[LayerRun]) -> list[Exception | None]:
    """`LayerSource.read_runs` for a source that has no cheaper way."""
    results = await asyncio.gather(*(source.read_layers(*run) for run in runs), return_exceptions=True)
    for result in results:
        if result is not None and not isinstance(result, Exception):
            raise result
    return [result if isinstance(result, Exception) else None for result in results]
