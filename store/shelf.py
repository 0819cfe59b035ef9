"""What the parts of a store share: which chunks there are, where they lie, and who may change one just now."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from weakref import WeakValueDictionary

from kvblend.store.disk import DiskTier
from kvblend.store.errors import ChunkDamaged, is_shortage
from kvblend.store.format import ChunkHeader
from kvblend.store.index import ChunkIndex, IndexRow
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.space import DiskSpace
from kvblend.store.stats import Counts
from kvblend.store.tasks import TaskSet
from kvblend.store.tiers import LowerTier

log = logging.getLogger("kvblend.store")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Opening:
    """A header on its way. `stale`: the chunk was deleted or dropped meanwhile, so what arrives is of no use."""

    task: asyncio.Task[PoolEntry | None]
    stale: bool = False


class Shelf:
    """The tiers of one store and the books about them. Whatever it forgets, it forgets everywhere at once."""

    def __init__(
        self,
        disk: DiskTier | None,
        remote: LowerTier | None,
        index: ChunkIndex,
        space: DiskSpace,
        pool: HostPool,
        counts: Counts,
    ) -> None:
        """`space` is that of `index`; it hears from the pool which chunks are in use."""
        self.disk = disk
        self.remote = remote
        self.index = index
        self.space = space
        self.pool = pool
        self.counts = counts
        pool.watch = space
        space.is_pinned = pool.is_pinned
        self.tasks = TaskSet()
        # known until the last who waits for one has gone on: a chunk may go behind its header's arrival as well
        self.openings: WeakValueDictionary[bytes, Opening] = WeakValueDictionary()
        self.leaving: set[bytes] = set()
        """Chunks that are being deleted or replaced: nobody may fetch them anew from wherever they still are."""
        # held by whoever changes where a chunk lies; a lock lives as long as somebody holds or awaits it
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def contains(self, digest: bytes) -> bool:
        """Whether a chunk is on disk or in memory; what only the remote tier has is not known here."""
        return digest in self.index or self.pool.get(digest) is not None

    def lock(self, digest: bytes) -> asyncio.Lock:
        """The lock of one chunk."""
        return self._locks.setdefault(digest, asyncio.Lock())

    def enlist(self, digest: bytes, row: IndexRow) -> None:
        """List a chunk whose file is there."""
        self.index.add(digest, row)
        self.space.add(digest, row)
        if self.disk is not None:
            self.disk.catalog.add(digest, row)

    def unlist(self, digest: bytes) -> bool:
        """Forget a chunk in memory and in the index; False when the index had none."""
        self.withdraw(digest)
        return self._unlist_row(digest)

    def withdraw(self, digest: bytes) -> None:
        """Forget a chunk in memory; who has leased it keeps what is there."""
        self.pool.drop(digest)
        self.outdate(digest)

    def outdate(self, digest: bytes) -> None:
        """Have nobody use a header of the chunk that is on its way."""
        opening = self.openings.pop(digest, None)
        if opening is not None:
            opening.stale = True  # it reads the header of what goes, not of what may follow

    def correct(self, digest: bytes, row: IndexRow, header: ChunkHeader) -> None:
        """Take over from a chunk's header what the catalog had wrong, as after a crash between file and catalog."""
        truth = IndexRow.of(header.key, header.num_tokens, header.file_bytes)
        if self.index.get(digest) is not row or row == truth:
            return
        self._unlist_row(digest)
        row.num_tokens, row.file_bytes, row.tenant = truth.num_tokens, truth.file_bytes, truth.tenant
        self.enlist(digest, row)

    def use(self, entry: PoolEntry) -> None:
        """A chunk was leased."""
        self.pool.use(entry)
        self._use_row(entry.key.digest)

    def use_copy(self, digest: bytes) -> None:
        """A chunk was used where a copy of it lies. That keeps it in the lowest tier here, not in memory above it."""
        entry = self.pool.get(digest)
        if entry is not None and (self.disk is None or digest not in self.index):
            self.pool.use(entry)
        self._use_row(digest)

    def _use_row(self, digest: bytes) -> None:
        row = self.index.get(digest)
        if row is not None and self.disk is not None:
            row.hits += 1
            row.used_s = time.time()
            self.space.use(digest, row)
            self.disk.catalog.use(digest, row)

    def forget(self, entry: PoolEntry, error: Exception) -> None:
        """A layer of `entry` could not be read."""
        digest = entry.key.digest
        if self.pool.get(digest) is not entry:
            return
        if entry.origin == "remote":
            self.pool.drop(digest)
            self.lose_remote(digest, error)
        elif is_shortage(error):
            self.pool.drop(digest)
            log.warning("chunk %s could not be read, it stays on disk: %s", digest.hex(), error)
        else:
            self.drop(digest, error)

    def drop(self, digest: bytes, error: Exception) -> None:
        """Forget a chunk whose file is of no use, with the one warning about it."""
        if not self.unlist(digest):
            return
        self.counts.damaged += 1
        log.warning("chunk %s is dropped, its file cannot be used: %s", digest.hex(), error)
        if isinstance(error, ChunkDamaged) and self.disk is not None:
            self.tasks.start(self._set_aside(self.disk, digest), f"store-aside-{digest.hex()[:12]}")

    def lose_remote(self, digest: bytes, error: Exception) -> None:
        """The remote tier did not give what it promised; a copy that is damaged there is removed there."""
        self.counts.remote_failed += 1
        # a tier that fails says so itself, once
        level = logging.WARNING if isinstance(error, ChunkDamaged) else logging.DEBUG
        log.log(level, "chunk %s could not be had from the remote tier: %s", digest.hex(), error)
        if isinstance(error, ChunkDamaged) and self.remote is not None:
            self.tasks.start(self._remove_remote(self.remote, digest), f"store-clear-{digest.hex()[:12]}")

    def _unlist_row(self, digest: bytes) -> bool:
        row = self.index.get(digest)
        if row is None:
            return False
        self.index.remove(digest)
        self.space.discard(digest, row)
        if self.disk is not None:
            self.disk.catalog.remove(digest)
        return True

    async def _set_aside(self, disk: DiskTier, digest: bytes) -> None:
        async with self.lock(digest):
            if digest in self.index:
                return  # stored anew meanwhile: the file is a good one again
            try:
                await disk.set_aside(digest)
            except OSError as error:
                log.warning("the damaged file of chunk %s could not be moved: %s", digest.hex(), error)

    async def _remove_remote(self, remote: LowerTier, digest: bytes) -> None:
        async with self.lock(digest):
            try:
                await remote.remove(digest)
            except Exception as error:  # whatever it was, the copy is checked again by whoever reads it
                log.warning("the damaged copy of chunk %s stays in the remote tier: %s", digest.hex(), error)
