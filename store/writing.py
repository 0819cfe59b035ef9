"""Taking a new chunk in: to disk, or to the remote tier where there is no folder, and into host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvblend.store.errors import StoreWriteFailed
from kvblend.store.keys import ChunkKey, tenant_tag
from kvblend.store.pool import PoolEntry
from kvblend.store.removing import Remover
from kvblend.store.shelf import Shelf

log = logging.getLogger("kvblend.store")


class Writer:
    """Writes chunks that are not there yet, making room for them; `wait_s` is how long a put waits for room."""

    def __init__(self, shelf: Shelf, remover: Remover, wait_s: float) -> None:
        self._shelf = shelf
        self._remover = remover
        self._wait_s = wait_s

    async def put(self, key: ChunkKey, packed_ids: bytes, views: Sequence[memoryview], cost_s: float) -> bool:
        """Store a chunk; False when it is there already. Raises StoreWriteFailed, with nothing of it visible."""
        async with self._shelf.lock(key.digest):
            if self._shelf.contains(key.digest):
                return False
            try:
                await self._store(key, packed_ids, views, cost_s)
            except StoreWriteFailed:
                self._shelf.counts.writes_failed += 1
                raise
            self._shelf.counts.writes += 1
            return True

    async def write_disk(
        self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview], cost_s: float, wait_s: float
    ) -> None:
        """Write a chunk's file and list it; the caller holds its lock. Raises StoreWriteFailed."""
        shelf, tenant = self._shelf, tenant_tag(key.salt)
        if shelf.disk is None:
            raise StoreWriteFailed("the store has no folder")
        ready = await shelf.disk.prepare(key, packed_ids, layers)
        num_bytes = ready.header.file_bytes
        await shelf.space.reserve(key.id, tenant, num_bytes, wait_s, self._remover.evict)
        try:
            row = await shelf.disk.write_ready(ready)
            row.cost_s = cost_s
            row.created_s = row.used_s = time.time()
            shelf.enlist(key.digest, row)
        finally:
            shelf.space.release(tenant, num_bytes)

    async def _store(self, key: ChunkKey, packed_ids: bytes, views: Sequence[memoryview], cost_s: float) -> None:
        shelf = self._shelf
        owned = [await self._copy(view) if view.readonly else view for view in views]
        entry = PoolEntry.filled(key, packed_ids, owned, cost_s)
        if shelf.disk is not None:
            await self.write_disk(key, packed_ids, owned, cost_s, self._wait_s)
        elif await self._write_remote(key, packed_ids, owned):
            pass
        elif not await shelf.pool.wait_until_fits(entry.num_bytes, self._wait_s):
            raise StoreWriteFailed(
                f"chunk {key.id} takes {entry.num_bytes} bytes; {shelf.pool.pinned_bytes} of the budget of "
                f"{shelf.pool.bytes_budget} bytes are leased, and the store has no folder"
            )
        if shelf.pool.get(key.digest) is None:
            shelf.pool.add(entry)

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
