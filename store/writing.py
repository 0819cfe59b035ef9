"""Taking a new chunk in: to disk, or to the remote tier where there is no folder, and into host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvblend.store.errors import StoreWriteFailed
from kvblend.store.keys import ChunkKey, tag_of
from kvblend.store.pool import PoolEntry
from kvblend.store.removing import Remover
from kvblend.store.shelf import Shelf
from kvblend.store.tiers import Tier

log = logging.getLogger("kvblend.store")


class NewChunk(NamedTuple):
    """A chunk to be stored: `views` are its layers, `cost_s` the seconds that computing it took (0: not known).

    With `replaces` it takes the place of one that is there. `tier` is the lowest tier from which it is read fast enough
    (None: not known): it leaves those above first.
    """

    key: ChunkKey
    packed_ids: bytes
    views: Sequence[memoryview]
    cost_s: float = 0.0
    replaces: bool = False
    tier: Tier | None = None


class Writer:
    """Writes chunks that are not there yet, making room for them; `wait_s` is how long a put waits for room."""

    def __init__(self, shelf: Shelf, remover: Remover, wait_s: float) -> None:
        self._shelf = shelf
        self._remover = remover
        self._wait_s = wait_s

    async def put(self, chunk: NewChunk) -> bool:
        """Store a chunk; False when it is there already, unless it is to be replaced.

        Raises StoreWriteFailed, with nothing of it visible; what was to be replaced stays.
        """
        digest = chunk.key.digest
        async with self._shelf.lock(digest):
            if self._shelf.contains(digest) and not chunk.replaces:
                return False
            try:
                await self._store(chunk)
            except StoreWriteFailed:
                self._shelf.counts.writes_failed += 1
                raise
            finally:
                self._shelf.leaving.discard(digest)
            self._shelf.counts.writes += 1
            return True

    async def write_disk(
        self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview], cost_s: float, wait_s: float
    ) -> None:
        """Write a chunk's file, in place of an older one, and list it; the caller holds its lock.

        Raises StoreWriteFailed.
        """
        shelf, tenant, digest = self._shelf, tag_of(key.tenant), key.digest
        if shelf.disk is None:
            raise StoreWriteFailed("the store has no folder")
        ready = await shelf.disk.prepare(key, packed_ids, layers)
        num_bytes, old = ready.header.file_bytes, shelf.index.get(digest)
        if old is not None:
            # both are there for a moment, and count as the larger one
            num_bytes = max(0, num_bytes - old.file_bytes)
            shelf.space.set_apart(digest, old)
        try:
            await shelf.space.reserve(key.id, tenant, num_bytes, wait_s, self._remover.evict)
            try:
                row = await shelf.disk.write_ready(ready, None if old is None else lambda: self._make_way(digest))
                row.cost_s = cost_s
                row.created_s = row.used_s = time.time()
                row.remote = "owed"
                shelf.enlist(digest, row)
            finally:
                shelf.space.release(tenant, num_bytes)
        finally:
            if old is not None:
                shelf.space.rejoin(digest)
                shelf.leaving.discard(digest)

    async def _make_way(self, digest: bytes) -> None:
        """Have nobody read the file of a chunk any more: it is about to be another one."""
        self._shelf.leaving.add(digest)
        await self._remover.complete_leased(digest)
        self._shelf.withdraw(digest)

    async def _spare_leased(self, digest: bytes) -> None:
        """Have nobody read the remote tier's copy of a chunk any more; what is whole in memory stays until the end."""
        shelf = self._shelf
        shelf.leaving.add(digest)
        await self._remover.complete_leased(digest)
        shelf.outdate(digest)
        pooled = shelf.pool.get(digest)
        if pooled is not None and not pooled.is_ready:
            shelf.pool.drop(digest)

    async def _store(self, chunk: NewChunk) -> None:
        shelf, (key, packed_ids, views, cost_s, *_) = self._shelf, chunk
        owned = [await self._copy(view) if view.readonly else view for view in views]
        entry = PoolEntry.filled(key, packed_ids, owned, cost_s)
        if shelf.disk is None and shelf.remote is not None and chunk.replaces:
            await self._spare_leased(key.digest)
        is_below = shelf.disk is not None or await self._write_remote(key, packed_ids, owned)
        if shelf.disk is not None:
            await self.write_disk(key, packed_ids, owned, cost_s, self._wait_s)
            if chunk.replaces:
                # those that came from the remote tier: the copy there is replaced once the lock is free
                await self._remover.complete_leased(key.digest)
        elif not is_below and not await shelf.pool.wait_until_fits(entry.num_bytes, self._wait_s):
            raise StoreWriteFailed(
                f"chunk {key.id} takes {entry.num_bytes} bytes; {shelf.pool.pinned_bytes} of the budget of "
                f"{shelf.pool.bytes_budget} bytes are leased, and the store has no folder"
            )
        if chunk.replaces:
            shelf.withdraw(key.digest)
        if shelf.pool.get(key.digest) is None:
            shelf.pool.add(entry)
            if chunk.tier in ("disk", "remote") and is_below:
                shelf.pool.demote(key.digest)

    async def _write_remote(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview]) -> bool:
        """Whether there is a remote tier and it took the chunk; what it does not take may find room in memory."""
        shelf = self._shelf
        if shelf.remote is None:
            return False
        try:
            await shelf.remote.write(key, packed_ids, layers)
        except Exception as error:  # whatever a remote tier does; it says itself when it fails
            shelf.counts.remote_failed += 1
            log.debug("chunk %s was not written to the remote tier: %s", key.id, error)
            return False
        shelf.counts.remote_writes += 1
        return True

    async def _copy(self, view: memoryview) -> memoryview:
        disk = self._shelf.disk
        return memoryview(bytearray(view)) if disk is None else await disk.copy(view)
