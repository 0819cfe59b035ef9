"""The CPU pool: whole chunks in host memory under a byte budget, least recently used first out. Book-keeping only."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvblend.store.format import ChunkHeader
from kvblend.store.keys import TOKEN_BYTES, ChunkKey

if TYPE_CHECKING:
    import asyncio


class PoolEntry:
    """One chunk in memory: `layers[i]` is layer i's payload (K then V, raw bytes), or None until it is read.

    `reads[i]` is the task that reads layer i just now. `failure` says why missing layers will never come. `pins` counts
    leases and reads; only the pool changes it. `num_bytes` is what the entry holds when all layers are there.
    """

    __slots__ = ("data", "failure", "header", "key", "layers", "num_bytes", "packed_ids", "pins", "reads")

    def __init__(
        self,
        key: ChunkKey,
        packed_ids: bytes,
        layers: list[memoryview | None],
        num_bytes: int,
        header: ChunkHeader | None = None,
        data: memoryview | None = None,
    ) -> None:
        self.key = key
        self.packed_ids = packed_ids
        self.layers = layers
        self.num_bytes = num_bytes
        self.header = header
        self.data = data
        self.reads: dict[int, asyncio.Task[None]] = {}
        self.failure: str | None = None
        self.pins = 0

    @classmethod
    def filled(cls, key: ChunkKey, packed_ids: bytes, layers: list[memoryview]) -> PoolEntry:
        """An entry with all layers there; the buffers are taken over, not copied."""
        return cls(key, packed_ids, list(layers), sum(layer.nbytes for layer in layers))

    @classmethod
    def empty(cls, header: ChunkHeader, data: memoryview) -> PoolEntry:
        """An entry whose layers will be read into their places in `data` (`header.data_bytes` long)."""
        return cls(header.key, header.packed_ids, [None] * len(header.layers), data.nbytes, header, data)

    @property
    def num_tokens(self) -> int:
        """How many tokens the chunk has."""
        return len(self.packed_ids) // TOKEN_BYTES

    @property
    def is_ready(self) -> bool:
        """True when every layer is there."""
        return all(layer is not None for layer in self.layers)

    def mark_ready(self, first: int, stop: int) -> None:
        """Layers `first..stop-1` were read into `data` and verified."""
        if self.header is None or self.data is None:
            raise ValueError("an entry without a file has nothing to read")
        for index in range(first, stop):
            span = self.header.layers[index]
            self.layers[index] = self.data[span.offset : span.offset + span.length]


class HostPool:
    """Entries by digest. Unpinned ones go when the budget (bytes) is exceeded; pinned ones never do, and may exceed it.

    Eviction takes constant time per entry: pinned entries are kept apart.
    """

    def __init__(self, bytes_budget: int) -> None:
        """Raises ValueError for a budget below one byte."""
        if bytes_budget < 1:
            raise ValueError(f"host_bytes_budget is {bytes_budget}; it must be at least 1")
        self.bytes_budget = bytes_budget
        self.num_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0
        self._idle: OrderedDict[bytes, PoolEntry] = OrderedDict()
        self._pinned: dict[bytes, PoolEntry] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._pinned)

    def get(self, digest: bytes) -> PoolEntry | None:
        """The entry of a chunk, or None. Does not count as use."""
        return self._idle.get(digest) or self._pinned.get(digest)

    def fits(self, num_bytes: int) -> bool:
        """Whether an entry of this size would stay, once others that are not pinned have gone."""
        return self.pinned_bytes + num_bytes <= self.bytes_budget

    def add(self, entry: PoolEntry, pins: int = 0) -> None:
        """Take an entry in as the most recently used, pinned `pins` times. ValueError when its chunk is there."""
        digest = entry.key.digest
        if self.get(digest) is not None:
            raise ValueError(f"chunk {entry.key.id} is in the pool already")
        self.num_bytes += entry.num_bytes
        entry.pins += pins
        if entry.pins:
            self.pinned_bytes += entry.num_bytes
            self._pinned[digest] = entry
        else:
            self._idle[digest] = entry
        self._trim()

    def pin(self, entry: PoolEntry) -> None:
        """Keep the entry until as many `unpin` calls have come. One that left the pool only counts."""
        digest = entry.key.digest
        entry.pins += 1
        if self._idle.get(digest) is entry:
            del self._idle[digest]
            self._pinned[digest] = entry
            self.pinned_bytes += entry.num_bytes

    def unpin(self, entry: PoolEntry) -> None:
        """Undo one `pin`; the last one makes the entry the most recently used that may go. ValueError without a pin."""
        if not entry.pins:
            raise ValueError(f"chunk {entry.key.id} is not pinned")
        entry.pins -= 1
        digest = entry.key.digest
        if not entry.pins and self._pinned.get(digest) is entry:
            del self._pinned[digest]
            self.pinned_bytes -= entry.num_bytes
            self._idle[digest] = entry
            self._trim()

    def evict(self, digest: bytes) -> bool:
        """Let one entry go if it is there and not pinned."""
        entry = self._idle.pop(digest, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        self.evictions += 1
        return True

    def drop(self, digest: bytes) -> PoolEntry | None:
        """Take an entry out whatever its pins: nobody finds it any more, and who holds it keeps its bytes."""
        entry = self._idle.pop(digest, None)
        if entry is None:
            entry = self._pinned.pop(digest, None)
            if entry is None:
                return None
            self.pinned_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        return entry

    def validate(self) -> None:
        """Raise RuntimeError naming the first broken rule; for tests."""
        rules = {
            "bytes are those of the entries": self.num_bytes == _bytes_of(self._idle) + _bytes_of(self._pinned),
            "pinned bytes are those of pinned entries": self.pinned_bytes == _bytes_of(self._pinned),
            "idle entries have no pins": all(not entry.pins for entry in self._idle.values()),
            "pinned entries have pins": all(entry.pins for entry in self._pinned.values()),
            "only pinned entries exceed the budget": self.num_bytes <= self.bytes_budget or not self._idle,
        }
        for rule, holds in rules.items():
            if not holds:
                raise RuntimeError(f"pool: not true that {rule}")

    def _trim(self) -> None:
        while self._idle and self.num_bytes > self.bytes_budget:
            self.evict(next(iter(self._idle)))


def _bytes_of(entries: dict[bytes, PoolEntry] | OrderedDict[bytes, PoolEntry]) -> int:
    return sum(entry.num_bytes for entry in entries.values())
