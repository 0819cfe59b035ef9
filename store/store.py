"""The chunk store: exact KV of text chunks, kept on disk and in a bounded part of host memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from kvblend.store.disk import DiskTier, ScanReport, allocate
from kvblend.store.errors import ChunkDamaged, ForeignFile, StoreUnusable, StoreWriteFailed
from kvblend.store.files import DiskIO
from kvblend.store.format import Buffer, KVShape
from kvblend.store.incoming import check_ids, check_layers
from kvblend.store.index import ChunkIndex, IndexRow
from kvblend.store.keys import ChunkKey, id_digest, pack_ids, unpack_ids
from kvblend.store.lease import ChunkLease, Tier
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.reads import LayerReader
from kvblend.store.stats import Counts, StoreStats, count_stats
from kvblend.store.tasks import TaskSet

__all__ = [
    "ChunkDamaged",
    "ChunkLease",
    "ChunkStore",
    "DiskIO",
    "KVShape",
    "StoreStats",
    "StoreUnusable",
    "StoreWriteFailed",
]

log = logging.getLogger("kvblend.store")


class ChunkStore:
    """Chunks of one model. Without a folder the host pool is all there is, and what it evicts is gone.

    What goes wrong with a stored chunk is a miss and one warning; the chunk is forgotten so that it can be stored anew.
    """

    def __init__(
        self, shape: KVShape, fingerprint: str, host_bytes_budget: int, disk: DiskTier | None, found: ScanReport
    ) -> None:
        """Use `open`."""
        self.shape = shape
        self.fingerprint = fingerprint
        self._disk = disk
        self._index = ChunkIndex(found.rows)
        self._counts = Counts(damaged=found.damaged, foreign=found.foreign)
        self._pool = HostPool(host_bytes_budget)
        self._tasks = TaskSet()
        self._reader = LayerReader(disk, self._pool, self._tasks, self._forget)
        self._opens: dict[bytes, asyncio.Task[PoolEntry | None]] = {}
        # held by whoever changes a chunk's file; a lock lives as long as somebody holds or awaits it
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, root: Path | None, shape: KVShape, fingerprint: str, host_bytes_budget: int, io: DiskIO | None = None
    ) -> ChunkStore:
        """Open the store in folder `root` (made if it is missing), or one in memory only where `root` is None.

        `io` replaces the local file system; it is closed with the store. Raises StoreUnusable naming path and reason,
        and ValueError for a budget (bytes) below 1.
        """
        if host_bytes_budget < 1:
            raise ValueError(f"host_bytes_budget is {host_bytes_budget}; it must be at least 1")
        if root is None:
            return cls(shape, fingerprint, host_bytes_budget, None, ScanReport())
        disk, found = await DiskTier.open(root, shape, fingerprint, io)
        return cls(shape, fingerprint, host_bytes_budget, disk, found)

    def contains(self, key: ChunkKey) -> bool:
        """Whether the chunk is stored, as far as memory knows; no I/O."""
        return key.digest in self._index or self._pool.get(key.digest) is not None

    async def lease(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkLease | None:
        """A lease of the chunk, or None for a miss: unknown, unreadable, other token ids, or the store is closed.

        Raises ValueError for token ids outside uint32.
        """
        packed_ids = pack_ids(token_ids)
        entry = None if self._closing else await self._pin_entry(key)
        if entry is not None and entry.packed_ids != packed_ids:
            log.warning("chunk %s holds other token ids than those asked for: a miss", key.id)
            self._pool.unpin(entry)
            entry = None
        if entry is None:
            self._counts.misses += 1
            return None
        tier: Tier = "host" if entry.is_ready else "disk"
        if tier == "host":
            self._counts.hits_host += 1
        else:
            self._counts.hits_disk += 1
        self._counts.leases += 1
        return ChunkLease(entry, tier, self._reader, self._give_back)

    async def put(self, key: ChunkKey, token_ids: Sequence[int], layers: Sequence[Buffer]) -> bool:
        """Store a chunk, durably when this returns; False when it was there already.

        `layers[i]` is layer i's payload (K, V, then in all layers or none a float32 per token). The buffers become the
        store's: it serves them from memory without a copy (read-only ones are copied). Calls for one key run one after
        another, and a cancelled caller's write is finished all the same.

        Raises StoreWriteFailed when the chunk cannot be kept, ValueError when the arguments contradict each other.
        """
        packed_ids = check_ids(key, token_ids, self.fingerprint)
        views = check_layers(layers, self.shape, len(token_ids))
        if self._closing:
            raise StoreWriteFailed("the store is closed")
        if self.contains(key):
            return False
        return await self._tasks.run(self._put(key, packed_ids, views), f"store-put-{key.id[:12]}")

    async def token_ids(self, chunk_id: str) -> tuple[int, ...] | None:
        """The token ids of a stored chunk by its public id; None when there is none, or the id is no 64 hex digits."""
        digest = id_digest(chunk_id)
        if digest is None:
            return None
        entry = self._pool.get(digest)
        if entry is None:
            entry = await self._open_entry(digest)
        return None if entry is None else unpack_ids(entry.packed_ids)

    def evict_nowait(self, chunk_id: str) -> bool:
        """Take a chunk out of host memory; False when it is not there or leased. In a store without a folder it is
        gone then.
        """
        digest = id_digest(chunk_id)
        return digest is not None and self._pool.evict(digest)

    async def delete(self, chunk_id: str) -> bool:
        """Delete a chunk everywhere; False when it is unknown, its file cannot be removed, or the store is closed.

        Leases of it stay usable: their layers are read before the file goes.
        """
        digest = id_digest(chunk_id)
        if digest is None or self._closing:
            return False
        return await self._tasks.run(self._delete(digest), f"store-delete-{chunk_id[:12]}")

    def stats(self) -> StoreStats:
        """The state of this moment and the counts since `open`."""
        return count_stats(self._counts, self._index, self._pool, self._reader, has_disk=self._disk is not None)

    async def close(self) -> None:
        """Finish writes and reads under way, then give the folder back. Leases keep the layers they have."""
        if self._closing is None:
            self._reader.closed = True
            self._closing = asyncio.create_task(self._close(), name="store-close")
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _close(self) -> None:
        await self._tasks.drain()
        if self._disk is not None:
            await self._disk.close()

    async def _pin_entry(self, key: ChunkKey) -> PoolEntry | None:
        """The chunk's entry, pinned once for the caller."""
        entry = self._pool.get(key.digest)
        if entry is None:
            row = self._index.get(key.digest)
            entry = await self._open_entry(key.digest)
            # the chunk may have been deleted, or stored anew, while its header was read
            if entry is None or entry.failure or row is None or self._index.get(key.digest) is not row:
                return None
            pooled = self._pool.get(key.digest)
            if pooled is None:
                self._pool.add(entry, pins=1)
                return entry
            entry = pooled
        self._pool.pin(entry)
        return entry

    async def _open_entry(self, digest: bytes) -> PoolEntry | None:
        """An entry without layers, from the header of the chunk's file; one read for all who ask at the same time."""
        row = self._index.get(digest)
        if self._disk is None or row is None:
            return None
        task = self._opens.get(digest)
        if task is None:
            if self._closing:
                return None
            work = self._read_entry(self._disk, digest, row)
            task = self._opens[digest] = self._tasks.start(work, f"store-open-{digest.hex()[:12]}")
        await asyncio.wait({task})
        return task.result()

    async def _read_entry(self, disk: DiskTier, digest: bytes, row: IndexRow) -> PoolEntry | None:
        try:
            header = await disk.read_header(digest)
            return PoolEntry.empty(header, allocate(header.data_bytes))
        except (ChunkDamaged, ForeignFile, OSError) as error:
            if self._index.get(digest) is row:
                self._drop(digest, error)
            return None
        finally:
            if self._opens.get(digest) is asyncio.current_task():
                del self._opens[digest]

    async def _put(self, key: ChunkKey, packed_ids: bytes, views: list[memoryview]) -> bool:
        async with self._lock(key.digest):
            if self.contains(key):
                return False
            owned = [await self._copy(view) if view.readonly else view for view in views]
            entry = PoolEntry.filled(key, packed_ids, owned)
            if self._disk is None:
                if not self._pool.fits(entry.num_bytes):
                    self._counts.writes_failed += 1
                    raise StoreWriteFailed(
                        f"chunk {key.id} takes {entry.num_bytes} bytes; {self._pool.pinned_bytes} of the budget of "
                        f"{self._pool.bytes_budget} bytes are leased, and the store has no folder"
                    )
            else:
                try:
                    row = await self._disk.write(key, packed_ids, owned)
                except StoreWriteFailed:
                    self._counts.writes_failed += 1
                    raise
                self._index.add(key.digest, row)
            self._pool.add(entry)
            self._counts.writes += 1
            return True

    async def _copy(self, view: memoryview) -> memoryview:
        return memoryview(bytearray(view)) if self._disk is None else await self._disk.copy(view)

    async def _delete(self, digest: bytes) -> bool:
        async with self._lock(digest):
            entry = self._pool.get(digest)
            known = digest in self._index or entry is not None
            if self._disk is None or not known:
                return self._pool.drop(digest) is not None
            await self._complete_leased(digest)
            self._unlist(digest)
            try:
                await self._disk.remove(digest)
            except OSError as error:
                log.warning("chunk %s is forgotten, its file could not be removed: %s", digest.hex(), error)
                return False
            return True

    async def _complete_leased(self, digest: bytes) -> None:
        """Read what is missing of a leased chunk; again where it was given back and leased anew meanwhile."""
        while (entry := self._pool.get(digest)) is not None and entry.pins and not entry.is_ready:
            try:
                await self._reader.ensure(entry, range(len(entry.layers)))
            except ChunkDamaged:
                return

    def _lock(self, digest: bytes) -> asyncio.Lock:
        return self._locks.setdefault(digest, asyncio.Lock())

    def _give_back(self, entry: PoolEntry) -> None:
        self._counts.leases -= 1
        self._pool.unpin(entry)

    def _forget(self, entry: PoolEntry, error: Exception) -> None:
        """A layer of `entry` could not be read."""
        if self._pool.get(entry.key.digest) is entry:
            self._drop(entry.key.digest, error)

    def _drop(self, digest: bytes, error: Exception) -> None:
        """Forget a chunk whose file is of no use, with the one warning about it."""
        if not self._unlist(digest):
            return
        self._counts.damaged += 1
        log.warning("chunk %s is dropped, its file cannot be used: %s", digest.hex(), error)
        if isinstance(error, ChunkDamaged) and self._disk is not None:
            self._tasks.start(self._set_aside(self._disk, digest), f"store-aside-{digest.hex()[:12]}")

    def _unlist(self, digest: bytes) -> bool:
        self._pool.drop(digest)
        self._opens.pop(digest, None)  # it reads the header of the file that goes, not of one that may follow
        return self._index.remove(digest)

    async def _set_aside(self, disk: DiskTier, digest: bytes) -> None:
        async with self._lock(digest):
            if digest in self._index:
                return  # stored anew meanwhile: the file is a good one again
            try:
                await disk.set_aside(digest)
            except OSError as error:
                log.warning("the damaged file of chunk %s could not be moved: %s", digest.hex(), error)
