"""From a chunk's name to its entry in the host pool: the header is read from disk, or asked of the remote tier."""

from __future__ import annotations

import asyncio
import logging

from kvblend.store.buffers import BufferPool
from kvblend.store.disk import DiskTier
from kvblend.store.errors import ChunkDamaged, ForeignFile, is_shortage
from kvblend.store.format import KVShape
from kvblend.store.index import IndexRow
from kvblend.store.pool import PoolEntry
from kvblend.store.shelf import Opening, Shelf
from kvblend.store.tiers import LowerTier

log = logging.getLogger("kvblend.store")
BUFFERS_BYTES_MAX = 256 << 20
"""What is kept of memory that chunks were read into, for the next ones."""


class Opener:
    """Finds or makes entries; one header read serves all who ask for a chunk at the same time."""

    def __init__(self, shelf: Shelf, shape: KVShape) -> None:
        self._shelf = shelf
        self._shape = shape
        self._buffers = BufferPool(min(shelf.pool.bytes_budget // 8, BUFFERS_BYTES_MAX))
        self.closed = False

    async def pin(self, digest: bytes) -> PoolEntry | None:
        """The chunk's entry, pinned once for the caller; None for a miss in every tier."""
        entry = await self.find(digest)
        if entry is None:
            return None
        pooled = self._shelf.pool.get(digest)
        if pooled is None:
            self._shelf.pool.add(entry, pins=1)
            return entry
        self._shelf.pool.pin(pooled)
        return pooled

    async def find(self, digest: bytes) -> PoolEntry | None:
        """The chunk's entry, in the pool or about to be put there by who wants to keep it; None for a miss."""
        entry = self._shelf.pool.get(digest)
        if entry is not None:
            return entry
        was_listed = digest in self._shelf.index
        entry = await self._open(digest)
        if entry is None and was_listed and not self._shelf.contains(digest):
            # a chunk whose file turned out to be bad may still lie in the remote tier
            entry = await self._open(digest)
        return entry

    async def _open(self, digest: bytes) -> PoolEntry | None:
        """An entry without layers, as long as the chunk is not deleted, dropped or stored anew meanwhile."""
        shelf = self._shelf
        opening = shelf.openings.get(digest)
        if opening is None:
            row = shelf.index.get(digest)
            if self.closed or digest in shelf.leaving:
                return None
            name = f"store-open-{digest.hex()[:12]}"
            if row is not None and shelf.disk is not None:
                task = shelf.tasks.start(self._read_disk(shelf.disk, digest, row), name)
            elif row is None and shelf.remote is not None:
                task = shelf.tasks.start(self._ask_remote(shelf.remote, digest), name)
            else:
                return None
            opening = shelf.openings[digest] = Opening(task)
        await asyncio.wait({opening.task})
        entry = opening.task.result()
        return None if entry is None or entry.failure or opening.stale else entry

    async def _read_disk(self, disk: DiskTier, digest: bytes, row: IndexRow) -> PoolEntry | None:
        try:
            header = await disk.read_header(digest)
            self._shelf.correct(digest, row, header)
            return PoolEntry.empty(header, self._buffers.allocate(header.data_bytes), disk, "disk", row.cost_s)
        except (ChunkDamaged, ForeignFile, OSError) as error:
            if is_shortage(error):
                log.warning("chunk %s could not be opened, it stays on disk: %s", digest.hex(), error)
            elif self._shelf.index.get(digest) is row:
                self._shelf.drop(digest, error)
            return None

    async def _ask_remote(self, remote: LowerTier, digest: bytes) -> PoolEntry | None:
        try:
            header = await remote.fetch_header(digest)
            if header is None:
                return None
            if header.key.digest != digest or header.shape != self._shape:
                raise ForeignFile("it is another chunk, or one of another shape")
            return PoolEntry.empty(header, self._buffers.allocate(header.data_bytes), remote, "remote")
        except Exception as error:  # whatever a remote tier does, it is a miss
            self._shelf.lose_remote(digest, error)
            return None
