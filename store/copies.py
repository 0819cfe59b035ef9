"""Copies between the lower tiers, behind everybody's back: new chunks to the remote tier, fetched ones to disk."""

from __future__ import annotations

import asyncio
import logging

from kvblend.store.errors import StoreWriteFailed
from kvblend.store.opening import Opener
from kvblend.store.pool import PoolEntry
from kvblend.store.reads import LayerReader
from kvblend.store.shelf import Shelf
from kvblend.store.writing import Writer

log = logging.getLogger("kvblend.store")

UPLOADS_MAX = 1024
"""How many chunks may wait for their copy in the remote tier; what comes beyond is on disk only."""
FETCHED_MAX = 4
"""How many fetched chunks may be held in memory for their copy on disk; what comes beyond is not copied."""


class TierCopies:
    """Two kinds of background work, each bounded. Only names wait for an upload; the bytes are looked up then."""

    def __init__(self, shelf: Shelf, opener: Opener, reader: LayerReader, writer: Writer) -> None:
        self._shelf = shelf
        self._opener = opener
        self._reader = reader
        self._writer = writer
        self._waiting: dict[bytes, None] = {}
        self._uploading: asyncio.Task[None] | None = None
        self._current: bytes | None = None
        self._fetched = 0
        self.closed = False

    @property
    def waiting(self) -> int:
        """How many chunks wait for their copy in the remote tier."""
        return len(self._waiting)

    def upload(self, digest: bytes) -> None:
        """Copy a chunk on disk to the remote tier soon, unless too many wait already."""
        if self._shelf.remote is None or self._shelf.disk is None or self.closed:
            return
        if len(self._waiting) >= UPLOADS_MAX:
            self._shelf.counts.remote_skipped += 1
            return
        self._waiting[digest] = None
        if self._uploading is None:
            self._uploading = self._shelf.tasks.start(self._upload_all(), "store-upload")

    def keep_fetched(self, entry: PoolEntry) -> None:
        """All layers of `entry` are there: where they came from the remote tier, write them to disk soon."""
        if entry.origin != "remote" or self._shelf.disk is None or self.closed or self._fetched >= FETCHED_MAX:
            return
        self._fetched += 1
        self._shelf.pool.pin(entry)
        self._shelf.tasks.start(self._keep(entry), f"store-keep-{entry.key.id[:12]}")

    async def upload_now(self, digest: bytes) -> None:
        """Copy a chunk that waits for it at once, as it is about to leave the disk; others are left alone.

        Returns when a copy that is under way already has ended, too.
        """
        if digest in self._waiting:
            del self._waiting[digest]
            await self._upload(digest)
        elif digest == self._current:
            async with self._shelf.lock(digest):
                pass

    async def close(self, uploads_s: float) -> None:
        """Begin nothing new, and go on with the uploads that wait for `uploads_s` seconds at most."""
        self.closed = True
        if self._uploading is not None:
            giving_up = asyncio.get_running_loop().call_later(uploads_s, self.skip_waiting)
            await asyncio.wait({self._uploading})
            giving_up.cancel()

    def skip_waiting(self) -> None:
        """Give up the uploads that have not begun; their chunks stay on disk."""
        if self._waiting:
            log.warning("%d chunks were not copied to the remote tier; they are on disk", len(self._waiting))
            self._shelf.counts.remote_skipped += len(self._waiting)
            self._waiting.clear()

    async def _upload_all(self) -> None:
        try:
            while self._waiting:
                digest = next(iter(self._waiting))
                del self._waiting[digest]
                self._current = digest
                await self._upload(digest)
        finally:
            self._uploading = self._current = None

    async def _upload(self, digest: bytes) -> None:
        shelf = self._shelf
        async with shelf.lock(digest):
            if shelf.remote is None or digest not in shelf.index:
                return  # deleted or evicted before its turn came
            entry = await self._opener.pin(digest)
            if entry is None:
                return
            try:
                await self._reader.ensure(entry, range(len(entry.layers)))
                layers = [layer for layer in entry.layers if layer is not None]
                await shelf.remote.write(entry.key, entry.packed_ids, layers)
                shelf.counts.remote_writes += 1
            except Exception as error:  # the chunk is on disk: nothing is lost, and the tier says itself when it fails
                shelf.counts.remote_failed += 1
                log.debug("chunk %s was not copied to the remote tier: %s", digest.hex(), error)
            finally:
                shelf.pool.unpin(entry)

    async def _keep(self, entry: PoolEntry) -> None:
        shelf, digest = self._shelf, entry.key.digest
        try:
            async with shelf.lock(digest):
                # deleted meanwhile, or stored here by somebody who computed it
                if digest in shelf.index or shelf.pool.get(digest) is not entry:
                    return
                layers = [layer for layer in entry.layers if layer is not None]
                await self._writer.write_disk(entry.key, entry.packed_ids, layers, entry.cost_s, wait_s=0.0)
        except StoreWriteFailed as error:
            log.info("chunk %s stays in the remote tier only: %s", digest.hex(), error)
        finally:
            self._fetched -= 1
            shelf.pool.unpin(entry)
