"""A lease: the right to a chunk's layers, and the promise that they stay while it is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvblend.store.errors import ChunkDamaged
from kvblend.store.keys import ChunkKey
from kvblend.store.pool import PoolEntry
from kvblend.store.reads import LayerReader
from kvblend.store.tiers import Tier


class ChunkLease:
    """Access to one chunk until `release`, also as a context manager. `tier` is where it was when leased, `layer_bytes`
    the length of each of its layers.

    A layer is a writable memoryview of raw bytes, K then V, each `[num_kv_heads, num_tokens, head_dim]` in the store's
    dtype, K un-rotated. It is shared by all lessees: nobody may write to it, nor use it after `release`.
    """

    __slots__ = ("_entry", "_give_back", "_reader", "_released", "key", "layer_bytes", "num_tokens", "tier")

    def __init__(self, entry: PoolEntry, reader: LayerReader, give_back: Callable[[PoolEntry], None]) -> None:
        """`entry` is pinned for this lease; `give_back` is called once, to unpin it."""
        self.key: ChunkKey = entry.key
        self.num_tokens = entry.num_tokens
        self.layer_bytes = entry.layer_bytes
        self.tier: Tier = "host" if entry.is_ready else entry.origin
        self._entry = entry
        self._give_back = give_back
        self._reader = reader
        self._released = False

    @property
    def is_current(self) -> bool:
        """Whether the chunk is still stored as it was leased: neither gone nor stored anew since."""
        return self._reader.is_current(self._entry)

    async def layer(self, index: int) -> memoryview:
        """Layer `index`, read and verified if it is not in memory yet.

        Raises ChunkDamaged when its bytes cannot be had (the store forgets the chunk), ValueError for an index outside
        the model's layers or a released lease.
        """
        ready = self.layer_nowait(index)
        if ready is not None:
            return ready
        await self._reader.ensure(self._entry, (index,))
        view = self._entry.layers[index]
        if view is None:
            raise RuntimeError(f"layer {index} was reported as read and is not there")
        return view

    def layer_nowait(self, index: int) -> memoryview | None:
        """Layer `index` if it is in memory, else None. ValueError as for `layer`."""
        self._check(index, index + 1)
        return self._entry.layers[index]

    async def prefetch(self, layers: range) -> None:
        """Bring these layers into memory, in one disk operation. Errors as for `layer`."""
        (error,) = await prefetch_all([self], layers)
        if error is not None:
            raise error

    @property
    def stored(self) -> ChunkLease:
        """This lease: the layers are read through it."""
        return self

    def release(self) -> None:
        """Give the lease back. A second call does nothing."""
        if not self._released:
            self._released = True
            self._give_back(self._entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _check(self, first: int, stop: int) -> None:
        if self._released:
            raise ValueError(f"the lease of chunk {self.key.id} was released")
        count = len(self._entry.layers)
        if not 0 <= first < stop <= count:
            raise ValueError(f"layers {first}..{stop - 1} asked for; the chunk has layers 0..{count - 1}")


async def prefetch_all(leases: Sequence[ChunkLease], layers: range) -> list[ChunkDamaged | None]:
    """Bring these layers of chunks of one store into memory, in one operation per tier; what went wrong with each.

    Raises ValueError for layers outside the model's, and a released lease.
    """
    if not leases or not layers:
        return [None] * len(leases)
    for lease in leases:
        lease._check(min(layers), max(layers) + 1)
    return await leases[0]._reader.ensure_all([lease._entry for lease in leases], layers)
