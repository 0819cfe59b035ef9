"""The chunk store: exact KV of text chunks, kept on disk and in a bounded part of host memory."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvblend.store.copies import TierCopies
from kvblend.store.disk import DiskTier, ScanReport
from kvblend.store.errors import ChunkDamaged, ForeignFile, StoreUnusable, StoreWriteFailed
from kvblend.store.files import DiskIO
from kvblend.store.format import Buffer, KVShape
from kvblend.store.incoming import check_ids, check_layers
from kvblend.store.index import ChunkIndex
from kvblend.store.keys import ChunkKey, id_digest, pack_ids, tenant_of, unpack_ids
from kvblend.store.lease import ChunkLease
from kvblend.store.limits import WAIT_S, StoreLimits
from kvblend.store.listing import ListedChunk, describe, list_page
from kvblend.store.opening import Opener
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.probing import Reading, probe
from kvblend.store.reads import LayerReader
from kvblend.store.remote_stats import RemoteFigures
from kvblend.store.removing import Remover
from kvblend.store.shelf import Shelf
from kvblend.store.space import DiskSpace
from kvblend.store.stats import Counts, StoreStats, count_stats
from kvblend.store.tasks import TaskSet
from kvblend.store.tiers import LowerTier, Tier
from kvblend.store.writing import NewChunk, Writer

__all__ = [
    "ChunkDamaged",
    "ChunkLease",
    "ChunkStore",
    "DiskIO",
    "ForeignFile",
    "KVShape",
    "StoreStats",
    "StoreUnusable",
    "StoreWriteFailed",
]

log = logging.getLogger("kvblend.store")

UPLOADS_END_S = 10.0
"""How long a closing store still copies chunks to the remote tier."""


class ChunkStore:
    """Chunks of one model. Without a folder the host pool is all there is, and what it evicts is gone, unless a remote
    tier has it.

    What goes wrong with a stored chunk is a miss and one warning; the chunk is forgotten so that it can be stored anew.
    """

    def __init__(
        self,
        shape: KVShape,
        fingerprint: str,
        limits: StoreLimits,
        disk: DiskTier | None,
        found: ScanReport,
        remote: LowerTier | None = None,
    ) -> None:
        """Use `open`."""
        self.shape = shape
        self.fingerprint = fingerprint
        self.limits = limits
        self._counts = Counts(damaged=found.damaged, foreign=found.foreign, headers_read=found.headers_read)
        self._pool = HostPool(limits.host_bytes_budget, limits.host_policy)
        index = ChunkIndex(found.rows)
        space = DiskSpace(index, limits.disk_bytes_budget, limits.disk_policy, limits.tenant_bytes_max)
        self._shelf = Shelf(disk, remote, index, space, self._pool, self._counts)
        self._tasks = self._shelf.tasks
        self._changes = TaskSet()
        self._reader = LayerReader(self._pool, self._tasks, self._shelf.forget)
        self._opener = Opener(self._shelf, shape)
        self._remover = Remover(self._shelf, self._reader)
        self._writer = Writer(self._shelf, self._remover, limits.wait_s)
        self._copies = TierCopies(self._shelf, self._opener, self._reader, self._writer)
        self._reader.on_complete = self._copies.keep_fetched
        self._remover.spill = self._copies.spill
        self._closing: asyncio.Task[None] | None = None
        if space.is_limited and len(index):
            self._tasks.start(space.trim(self._remover.evict), "store-trim")

    @classmethod
    async def open(
        cls,
        root: Path | None,
        shape: KVShape,
        fingerprint: str,
        host_bytes_budget: int,
        io: DiskIO | None = None,
        *,
        disk_bytes_budget: int | None = None,
        host_policy: str = "lru",
        disk_policy: str = "cost",
        tenant_bytes_max: int | None = None,
        wait_s: float = WAIT_S,
        remote: LowerTier | None = None,
    ) -> ChunkStore:
        """Open the store in folder `root` (made if it is missing), or one in memory only where `root` is None.

        Limits are those of `StoreLimits`. `io` replaces the local file system; `remote` is a tier below the disk. Both
        are closed with the store. Raises StoreUnusable naming path and reason, and ValueError for a limit out of range.
        """
        limits = StoreLimits(host_bytes_budget, disk_bytes_budget, host_policy, disk_policy, tenant_bytes_max, wait_s)
        if root is None:
            return cls(shape, fingerprint, limits, None, ScanReport(), remote)
        disk, found = await DiskTier.open(root, shape, fingerprint, io, limits)
        return cls(shape, fingerprint, limits, disk, found, remote)

    def contains(self, key: ChunkKey) -> bool:
        """Whether the chunk is stored, as far as memory knows; no I/O. What only the remote tier has is not known."""
        return self._shelf.contains(key.digest)

    async def lease(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkLease | None:
        """A lease of the chunk, or None for a miss: unknown, unreadable, other token ids, or the store is closed.

        Raises ValueError for token ids outside uint32.
        """
        packed_ids = pack_ids(token_ids)
        entry = None if self._closing else await self._opener.pin(key.digest)
        if entry is not None and entry.packed_ids != packed_ids:
            log.warning("chunk %s holds other token ids than those asked for: a miss", key.id)
            self._pool.unpin(entry)
            entry = None
        if entry is None:
            self._counts.misses += 1
            return None
        lease = ChunkLease(entry, self._reader, self._give_back)
        self._counts.count_lease(lease.tier)
        self._shelf.use(entry)
        return lease

    def use_nowait(self, key: ChunkKey) -> None:
        """Count one use of a chunk by somebody who has a copy of it: the store must not take it for one nobody asks
        for. Unknown chunks are ignored.
        """
        self._shelf.use_copy(key.digest)

    def watch_gone(self, gone: Callable[[bytes], None]) -> None:
        """Have `gone` called with the digest of each chunk that leaves the store or is stored anew, before anybody can
        ask for it again: copies of it are of no use then. A chunk that only leaves host memory is not gone.

        It may be called for chunks that are unknown or stay, too. It must not wait, nor call the store.
        """
        index = self._shelf.index
        self._pool.on_drop = gone
        # what lies in no folder, or is not copied there yet, was in memory only
        self._pool.on_evict = lambda digest: None if digest in index else gone(digest)

    async def put(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        layers: Sequence[Buffer],
        *,
        cost_s: float = 0.0,
        replace: bool = False,
        tier: Tier | None = None,
    ) -> bool:
        """Store a chunk; False when it was there already. When this returns it is durable: on disk, or, where there
        is no folder, in the remote tier if that can be reached.

        With `replace` it takes the place of the one that is there, in one step: whoever leased that keeps its bytes,
        and a crash or a failure leaves one of the two. `tier` is the lowest one from which it is read fast enough: from
        memory ("disk", "remote") and from disk ("remote", once it is copied) it goes before others until it is used.

        `layers[i]` is layer i's payload (K, V, then in all layers or none a float32 per token). The buffers become the
        store's: it serves them from memory without a copy (read-only ones are copied). Calls for one key run one after
        another, and a cancelled caller's write is finished all the same. `cost_s` is how long computing the chunk took,
        in seconds; 0 for not known.

        Raises StoreWriteFailed when the chunk cannot be kept, ValueError when the arguments contradict each other.
        """
        if not 0.0 <= cost_s < math.inf:
            raise ValueError(f"cost_s is {cost_s}; it must be a number of seconds")
        packed_ids = check_ids(key, token_ids, self.fingerprint)
        views = check_layers(layers, self.shape, len(token_ids))
        if self._closing:
            raise StoreWriteFailed("the store is closed")
        if self.contains(key) and not replace:
            return False
        work = self._writer.put(NewChunk(key, packed_ids, views, cost_s, replace, tier))
        created = await self._changes.run(work, f"store-put-{key.id[:12]}")
        if created:
            self._copies.upload(key.digest, goes_first=tier == "remote")
        return created

    async def token_ids(self, chunk_id: str, salt: str | None = None) -> tuple[int, ...] | None:
        """The token ids of a stored chunk by its public id; None when there is none, or the id is no 64 hex digits.

        Here and in what else takes a public id, `salt` makes other tenants' chunks unknown.
        """
        entry = await self._find(chunk_id, salt)
        return None if entry is None else unpack_ids(entry.packed_ids)

    async def find(self, chunk_id: str, salt: str | None = None) -> ListedChunk | None:
        """A stored chunk by its public id, in whatever tier; None when there is none."""
        entry = await self._find(chunk_id, salt)
        return None if entry is None else describe(entry.key.digest, self._shelf.index, entry)

    async def page(self, after: str, limit: int, salt: str | None = None) -> list[ListedChunk]:
        """At most `limit` chunks on disk or in memory, in the order of their ids, from behind the id `after` on.

        "" is the start. Chunks that only the remote tier has are not known.
        """
        return await list_page(self._shelf.index, self._pool, bytes.fromhex(after), limit, salt)

    def evict_nowait(self, chunk_id: str, salt: str | None = None) -> bool:
        """Take a chunk out of host memory; False when it is not there or leased. In a store without a folder it is
        gone then.
        """
        digest = id_digest(chunk_id)
        entry = None if digest is None else self._pool.get(digest)
        return entry is not None and _is_of(entry, salt) and self._pool.evict(entry.key.digest)

    async def delete(self, chunk_id: str, salt: str | None = None) -> bool:
        """Delete a chunk in every tier; False when it is unknown, it cannot be removed, or the store is closed.

        Leases of it stay usable: their layers are read before the file goes.
        """
        digest = id_digest(chunk_id)
        if digest is None or (salt is not None and await self._find(chunk_id, salt) is None) or self._closing:
            return False
        return await self._changes.run(self._remover.delete(digest), f"store-delete-{chunk_id[:12]}")

    def probe(self, seconds_max: float) -> AsyncGenerator[Reading, None]:
        """Read a few stored chunks from each lower tier, for so many seconds at most, to see how fast it is."""
        return probe(self._shelf, seconds_max)

    def stats(self) -> StoreStats:
        """The state of this moment and the counts since `open`."""
        self._counts.remote_waiting = self._copies.waiting
        aside = None if self._shelf.disk is None else self._shelf.disk.aside
        return count_stats(self._counts, self._shelf.index, self._shelf.space, self._pool, self._reader, aside)

    def remote_figures(self) -> RemoteFigures | None:
        """What the remote tier says of itself; None where there is none."""
        remote = self._shelf.remote
        return None if remote is None else remote.figures()

    async def close(self) -> None:
        """Finish writes and reads under way, then give the folder back. Leases keep the layers they have."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="store-close")
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _close(self) -> None:
        # uploads read what is not in memory, so they come first
        await self._copies.close(UPLOADS_END_S)
        # puts copy what leaves the disk for them, deletions read what is leased; nobody begins a new one
        await self._changes.drain()
        self._reader.closed = self._opener.closed = True
        await self._tasks.drain()
        if self._shelf.remote is not None:
            await self._shelf.remote.close()
        if self._shelf.disk is not None:
            await self._shelf.disk.close()

    async def _find(self, chunk_id: str, salt: str | None) -> PoolEntry | None:
        """The entry of a chunk of this tenant (None: of anybody), not pinned."""
        digest = id_digest(chunk_id)
        entry = None if digest is None else await self._opener.find(digest)
        return entry if entry is not None and _is_of(entry, salt) else None

    def _give_back(self, entry: PoolEntry) -> None:
        self._counts.leases -= 1
        self._pool.unpin(entry)


def _is_of(entry: PoolEntry, salt: str | None) -> bool:
    """Whether a chunk is this tenant's; None: anybody's."""
    return salt is None or entry.key.tenant == tenant_of(salt)
