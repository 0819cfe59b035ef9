"""Copies between the lower tiers, behind everybody's back: new chunks to the remote tier, fetched ones to disk."""

from __future__ import annotations

import asyncio
import logging
import time

from kvblend.store.disk import DiskTier
from kvblend.store.errors import ChunkDamaged, StoreWriteFailed
from kvblend.store.opening import Opener
from kvblend.store.pool import PoolEntry
from kvblend.store.reads import LayerReader
from kvblend.store.shelf import Shelf
from kvblend.store.tiers import LowerTier
from kvblend.store.writing import Writer

SPILL_GRACE_S = 60.0
"""While the remote tier fails, chunks without a copy there stay on disk for so long; then they may be lost."""

OUTAGE_FAILURES_MIN = 3
"""An outage is at least so many failures in a row: one long ago and one just now may be two accidents."""

log = logging.getLogger("kvblend.store")

UPLOADS_MAX = 1024
"""How many chunks may wait for their copy in the remote tier; what comes beyond is on disk only."""
FETCHED_MAX = 4
"""How many fetched chunks may be held in memory for their copy on disk; what comes beyond is not copied."""


class _Outage:
    """Failures of the remote tier to take a chunk, in a row: without a success in between, however far apart."""

    def __init__(self) -> None:
        self._failures = 0
        self._since_s = self._last_s = 0.0
        self.was_said = False

    def note_failure(self) -> None:
        self._last_s = time.monotonic()
        if not self._failures:
            self._since_s = self._last_s
        self._failures += 1

    def is_long(self) -> bool:
        return self._failures >= OUTAGE_FAILURES_MIN and self._last_s - self._since_s >= SPILL_GRACE_S


class TierCopies:
    """Two kinds of background work, each bounded. Only names wait for an upload; the bytes are looked up then."""

    def __init__(self, shelf: Shelf, opener: Opener, reader: LayerReader, writer: Writer) -> None:
        self._shelf = shelf
        self._opener = opener
        self._reader = reader
        self._writer = writer
        # by whether the chunk is to leave the disk first, once it has been copied
        self._waiting: dict[bytes, bool] = {}
        self._uploading: asyncio.Task[None] | None = None
        self._current: bytes | None = None
        self._fetched = 0
        self._outage = _Outage()
        self.closed = False

    @property
    def waiting(self) -> int:
        """How many chunks wait for their copy in the remote tier."""
        return len(self._waiting)

    def upload(self, digest: bytes, *, goes_first: bool = False) -> None:
        """Copy a new chunk on disk to the remote tier soon, unless too many wait already.

        With `goes_first` it is the first to leave the disk from then on, until it is used.
        """
        if self._shelf.remote is None or self._shelf.disk is None or self.closed:
            return
        if len(self._waiting) >= UPLOADS_MAX:
            self._shelf.counts.remote_skipped += 1
            return
        self._waiting[digest] = goes_first
        if self._uploading is None:
            self._uploading = self._shelf.tasks.start(self._upload_all(), "store-upload")

    def keep_fetched(self, entry: PoolEntry) -> None:
        """All layers of `entry` are there: where they came from the remote tier, write them to disk soon."""
        if entry.origin != "remote" or self._shelf.disk is None or self.closed or self._fetched >= FETCHED_MAX:
            return
        self._fetched += 1
        self._shelf.pool.pin(entry)
        self._shelf.tasks.start(self._keep(entry), f"store-keep-{entry.key.id[:12]}")

    async def spill(self, digest: bytes) -> bool:
        """Have the remote tier have a chunk that is about to leave the disk; False where it does not, and the chunk
        must stay.

        After `SPILL_GRACE_S` of failures it is True all the same, with a warning for the first chunk that is lost so.
        """
        shelf = self._shelf
        if shelf.remote is None:
            return True
        if digest == self._current:
            async with shelf.lock(digest):
                pass
        self._waiting.pop(digest, None)
        row = shelf.index.get(digest)
        if row is None or row.remote == "there":
            return True
        if row.remote == "unknown" and await self._is_there(shelf.remote, shelf.disk, digest):
            row.remote = "there"
            return True
        if await self._upload(digest) or shelf.index.get(digest) is not row:
            return True
        if not self._outage.is_long():
            return False
        if not self._outage.was_said:
            self._outage.was_said = True
            log.warning(
                "chunks leave the disk without a copy: the remote tier has failed for %g s or more", SPILL_GRACE_S
            )
        shelf.counts.remote_lost += 1
        return True

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
                goes_first = self._waiting.pop(digest)
                self._current = digest
                if await self._upload(digest) and goes_first:
                    self._shelf.space.demote(digest)
        finally:
            self._uploading = self._current = None

    async def _is_there(self, remote: LowerTier, disk: DiskTier | None, digest: bytes) -> bool:
        """Whether the remote tier has what the disk has, and not an older version of the chunk."""
        try:
            copy = await remote.fetch_header(digest)
            return copy is not None and disk is not None and copy.layers == (await disk.read_header(digest)).layers
        except Exception as error:  # whatever a tier does: the copy is made, or fails, next
            log.debug("chunk %s could not be looked up in the remote tier: %s", digest.hex(), error)
            return False

    async def _upload(self, digest: bytes) -> bool:
        """Whether the remote tier took the chunk."""
        shelf = self._shelf
        async with shelf.lock(digest):
            row = shelf.index.get(digest)
            if shelf.remote is None or row is None:
                return False  # deleted or evicted before its turn came
            entry = await self._opener.pin(digest)
            if entry is None:
                return False
            try:
                await self._reader.ensure(entry, range(len(entry.layers)))
                layers = [layer for layer in entry.layers if layer is not None]
                await shelf.remote.write(entry.key, entry.packed_ids, layers)
            except Exception as error:  # the chunk is on disk: nothing is lost, and the tier says itself when it fails
                shelf.counts.remote_failed += 1
                log.debug("chunk %s was not copied to the remote tier: %s", digest.hex(), error)
                if not isinstance(error, ChunkDamaged):
                    self._outage.note_failure()
                return False
            finally:
                shelf.pool.unpin(entry)
            row.remote = "there"
            shelf.counts.remote_writes += 1
            self._outage = _Outage()
            return True

    async def _keep(self, entry: PoolEntry) -> None:
        shelf, digest = self._shelf, entry.key.digest
        try:
            async with shelf.lock(digest):
                # deleted meanwhile, or stored here by somebody who computed it
                if digest in shelf.index or shelf.pool.get(digest) is not entry:
                    return
                layers = [layer for layer in entry.layers if layer is not None]
                await self._writer.write_disk(entry.key, entry.packed_ids, layers, entry.cost_s, wait_s=0.0)
                row = shelf.index.get(digest)
                if row is not None:
                    row.remote = "there"
        except StoreWriteFailed as error:
            log.info("chunk %s stays in the remote tier only: %s", digest.hex(), error)
        finally:
            self._fetched -= 1
            shelf.pool.unpin(entry)
