"""The CPU pool: whole chunks in host memory under a byte budget. Book-keeping only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from kvblend.store.eviction import COST_S_PER_TOKEN, make_policy
from kvblend.store.format import ChunkHeader
from kvblend.store.keys import TOKEN_BYTES, ChunkKey
from kvblend.store.tiers import LayerSource, Tier


class PoolEntry:
    """One chunk in memory: `layers[i]` is layer i's payload (K then V, raw bytes), or None until it is read.

    `reads[i]` is the task that reads layer i just now. `failure` says why missing layers will never come. `pins` counts
    leases and reads; only the pool changes it. `num_bytes` is what the entry holds when all layers are there. Missing
    layers come from `source`, which is the tier `origin`. `cost_s` is what computing the chunk took, 0 for not known.
    """

    __slots__ = (
        "cost_s", "data", "failure", "header", "key", "layers", "num_bytes", "origin", "packed_ids", "pins", "reads",
        "source",
    )  # fmt: skip

    def __init__(
        self,
        key: ChunkKey,
        packed_ids: bytes,
        layers: list[memoryview | None],
        num_bytes: int,
        header: ChunkHeader | None = None,
        data: memoryview | None = None,
        source: LayerSource | None = None,
        origin: Tier = "host",
        cost_s: float = 0.0,
    ) -> None:
        self.key = key
        self.packed_ids = packed_ids
        self.layers = layers
        self.num_bytes = num_bytes
        self.header = header
        self.data = data
        self.source = source
        self.origin: Tier = origin
        self.cost_s = cost_s
        self.reads: dict[int, asyncio.Task[None]] = {}
        self.failure: str | None = None
        self.pins = 0

    @classmethod
    def filled(cls, key: ChunkKey, packed_ids: bytes, layers: list[memoryview], cost_s: float = 0.0) -> PoolEntry:
        """An entry with all layers there; the buffers are taken over, not copied."""
        return cls(key, packed_ids, list(layers), sum(layer.nbytes for layer in layers), cost_s=cost_s)

    @classmethod
    def empty(
        cls, header: ChunkHeader, data: memoryview, source: LayerSource, origin: Tier, cost_s: float = 0.0
    ) -> PoolEntry:
        """An entry whose layers will be read from `source` into their places in `data` (`header.data_bytes` long)."""
        missing: list[memoryview | None] = [None] * len(header.layers)
        return cls(header.key, header.packed_ids, missing, data.nbytes, header, data, source, origin, cost_s)

    @property
    def num_tokens(self) -> int:
        """How many tokens the chunk has."""
        return len(self.packed_ids) // TOKEN_BYTES

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer; all layers of a chunk have the same."""
        if self.header is not None:
            return self.header.layers[0].length
        first = self.layers[0]
        return 0 if first is None else first.nbytes

    @property
    def is_ready(self) -> bool:
        """True when every layer is there."""
        return None not in self.layers

    def mark_ready(self, first: int, stop: int) -> None:
        """Layers `first..stop-1` were read into `data` and verified."""
        if self.header is None or self.data is None:
            raise ValueError("an entry without a file has nothing to read")
        for index in range(first, stop):
            span = self.header.layers[index]
            self.layers[index] = self.data[span.offset : span.offset + span.length]


class PinWatch(Protocol):
    """Hears which chunks are in use."""

    def hold(self, digest: bytes) -> None:
        """The chunk is pinned from now on."""

    def free(self, digest: bytes) -> None:
        """The chunk is not pinned any more."""


class HostPool:
    """Entries by digest. Unpinned ones go when the budget (bytes) is exceeded, in the order of a policy; pinned ones
    never do, and may exceed it. `watch` hears of first pins and last unpins, `on_drop` of chunks that are taken out by
    `drop` (whether they are here or not), `on_evict` of those that go to make room.
    """

    def __init__(self, bytes_budget: int, policy: str = "lru", watch: PinWatch | None = None) -> None:
        """Raises ValueError for a budget below one byte and an unknown policy."""
        if bytes_budget < 1:
            raise ValueError(f"host_bytes_budget is {bytes_budget}; it must be at least 1")
        self.bytes_budget = bytes_budget
        self.num_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0
        self.watch = watch
        self.on_drop: Callable[[bytes], None] | None = None
        self.on_evict: Callable[[bytes], None] | None = None
        self._policy = make_policy(policy)
        self._idle: dict[bytes, PoolEntry] = {}
        self._pinned: dict[bytes, PoolEntry] = {}
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._idle) + len(self._pinned)

    def get(self, digest: bytes) -> PoolEntry | None:
        """The entry of a chunk, or None. Does not count as use."""
        return self._idle.get(digest) or self._pinned.get(digest)

    def digests(self) -> list[bytes]:
        """All chunks here, in no order."""
        return [*self._idle, *self._pinned]

    def is_pinned(self, digest: bytes) -> bool:
        """Whether the chunk is here and in use."""
        return digest in self._pinned

    def fits(self, num_bytes: int) -> bool:
        """Whether an entry of this size would stay, once others that are not pinned have gone."""
        return self.pinned_bytes + num_bytes <= self.bytes_budget

    async def wait_until_fits(self, num_bytes: int, wait_s: float) -> bool:
        """Whether `fits` becomes true within `wait_s` seconds; at once False for what exceeds the whole budget."""
        if num_bytes > self.bytes_budget:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self.fits(num_bytes):
                    self._freed.clear()
                    await self._freed.wait()
        return self.fits(num_bytes)

    def add(self, entry: PoolEntry, pins: int = 0) -> None:
        """Take an entry in as just used, pinned `pins` times; one that does not fit and is not pinned stays outside.

        Raises ValueError when its chunk is there.
        """
        digest = entry.key.digest
        if self.get(digest) is not None:
            raise ValueError(f"chunk {entry.key.id} is in the pool already")
        entry.pins += pins
        if not entry.pins and not self.fits(entry.num_bytes):
            return  # it would have to go at once, and others before it
        self.num_bytes += entry.num_bytes
        self._idle[digest] = entry
        self._policy.add(digest, entry.num_bytes, entry.cost_s or entry.num_tokens * COST_S_PER_TOKEN)
        if entry.pins:
            self._set_pinned(entry)
        # whatever the policy thinks of it, a new entry is not the one that goes for itself
        self._policy.hold(digest)
        self._trim()
        if not entry.pins:
            self._policy.free(digest)

    def use(self, entry: PoolEntry) -> None:
        """Count one use of an entry; pins alone are none."""
        if self.get(entry.key.digest) is entry:
            self._policy.use(entry.key.digest)

    def demote(self, digest: bytes) -> None:
        """Let an entry go before all others, until it is used."""
        self._policy.demote(digest)

    def pin(self, entry: PoolEntry) -> None:
        """Keep the entry until as many `unpin` calls have come. One that left the pool only counts."""
        entry.pins += 1
        if self._idle.get(entry.key.digest) is entry:
            self._set_pinned(entry)

    def unpin(self, entry: PoolEntry) -> None:
        """Undo one `pin`; after the last one the entry may go, and counts as just used. ValueError without a pin."""
        if not entry.pins:
            raise ValueError(f"chunk {entry.key.id} is not pinned")
        entry.pins -= 1
        digest = entry.key.digest
        if not entry.pins and self._pinned.get(digest) is entry:
            self._set_idle(entry)
            self._trim()

    def evict(self, digest: bytes) -> bool:
        """Let one entry go if it is there and not pinned."""
        entry = self._idle.pop(digest, None)
        if entry is None:
            return False
        self._policy.discard(digest)
        self.num_bytes -= entry.num_bytes
        self.evictions += 1
        if self.on_evict is not None:
            self.on_evict(digest)
        return True

    def drop(self, digest: bytes) -> PoolEntry | None:
        """Take an entry out whatever its pins: nobody finds it any more, and who holds it keeps its bytes."""
        if self.on_drop is not None:
            self.on_drop(digest)
        entry = self._pinned.get(digest)
        if entry is not None:
            self._set_idle(entry)
        entry = self._idle.pop(digest, None)
        if entry is not None:
            self._policy.discard(digest)
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
            "the policy knows the entries": len(self._policy) == len(self),
            "idle entries may go": self._policy.free_bytes == _bytes_of(self._idle),
        }
        for rule, holds in rules.items():
            if not holds:
                raise RuntimeError(f"pool: not true that {rule}")

    def _set_pinned(self, entry: PoolEntry) -> None:
        digest = entry.key.digest
        self._pinned[digest] = self._idle.pop(digest)
        self._policy.hold(digest)
        self.pinned_bytes += entry.num_bytes
        if self.watch is not None:
            self.watch.hold(digest)

    def _set_idle(self, entry: PoolEntry) -> None:
        digest = entry.key.digest
        self._idle[digest] = self._pinned.pop(digest)
        self._policy.free(digest)
        self.pinned_bytes -= entry.num_bytes
        self._freed.set()
        if self.watch is not None:
            self.watch.free(digest)

    def _trim(self) -> None:
        while self.num_bytes > self.bytes_budget and (digest := self._policy.pop()) is not None:
            self.evict(digest)


def _bytes_of(entries: dict[bytes, PoolEntry]) -> int:
    return sum(entry.num_bytes for entry in entries.values())
