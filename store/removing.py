"""Taking chunks out: for good from every tier, or off the disk to make room."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from kvblend.store.errors import ChunkDamaged, SpillFailed
from kvblend.store.reads import LayerReader
from kvblend.store.shelf import Shelf

log = logging.getLogger("kvblend.store")


class Remover:
    """Deletes chunks, whoever has leased them gets their layers first; evicts chunks that nobody has leased."""

    def __init__(self, shelf: Shelf, reader: LayerReader) -> None:
        self._shelf = shelf
        self._reader = reader
        self.spill: Callable[[bytes], Awaitable[bool]] | None = None
        """Called with a chunk that is to be evicted, to give it to the tier below; says whether it may go."""

    async def delete(self, digest: bytes) -> bool:
        """Delete a chunk in every tier; False when there is none, or a copy of it may still be somewhere."""
        shelf = self._shelf
        async with shelf.lock(digest):
            shelf.leaving.add(digest)
            try:
                was_known = shelf.contains(digest)
                if was_known and (shelf.disk is not None or shelf.remote is not None):
                    await self.complete_leased(digest)
                gone = [await self._clear_here(digest, was_known), await self._clear_remote(digest, was_known)]
                return False not in gone and True in gone
            finally:
                shelf.leaving.discard(digest)

    async def evict(self, digest: bytes) -> bool:
        """Take a chunk that nobody has leased off the disk and out of memory; the remote tier keeps its copy.

        False when its file could not be removed, or it was leased or replaced meanwhile: it is listed again then, and
        still counts.
        Raises SpillFailed when the remote tier should have a copy first and did not take it; the chunk stays listed.
        """
        shelf = self._shelf
        row = shelf.index.get(digest)
        if row is None or shelf.disk is None:
            return False
        if self.spill is not None:
            may_go = await self.spill(digest)
            if shelf.index.get(digest) is not row:
                return True
            if not may_go:
                raise SpillFailed(f"chunk {digest.hex()} has no copy in the remote tier yet")
            if shelf.pool.is_pinned(digest) or shelf.space.is_apart(digest):
                shelf.enlist(digest, row)
                return False
        # before anything else is waited for, so that nobody finds a chunk that goes
        shelf.unlist(digest)
        async with shelf.lock(digest):
            if digest in shelf.index:
                return True  # stored anew meanwhile, in a file in the place of this one
            try:
                await shelf.disk.discard(digest)
            except OSError as error:
                log.warning("chunk %s could not be evicted, it stays: %s", digest.hex(), error)
                shelf.enlist(digest, row)
                return False
        return True

    async def _clear_here(self, digest: bytes, was_known: bool) -> bool | None:
        """Whether the chunk left memory and disk; None where it was in neither."""
        self._shelf.unlist(digest)
        if not was_known:
            return None
        if self._shelf.disk is not None:
            try:
                await self._shelf.disk.remove(digest)
            except OSError as error:
                log.warning("chunk %s is forgotten, its file could not be removed: %s", digest.hex(), error)
                return False
        return True

    async def _clear_remote(self, digest: bytes, was_known: bool) -> bool | None:
        """Whether the chunk left the remote tier; None where there is no such tier, or it had no such chunk."""
        remote = self._shelf.remote
        if remote is None:
            return None
        try:
            if not was_known and await remote.fetch_header(digest) is None:
                return None
            await remote.remove(digest)
        except Exception as error:  # whatever a remote tier does, the deletion here stands
            log.warning("chunk %s may still be in the remote tier: %s", digest.hex(), error)
            return False
        return True

    async def complete_leased(self, digest: bytes) -> None:
        """Read what is missing of a leased chunk; again where it was given back and leased anew meanwhile."""
        pool = self._shelf.pool
        while (entry := pool.get(digest)) is not None and entry.pins and not entry.is_ready:
            try:
                await self._reader.ensure(entry, range(len(entry.layers)))
            except ChunkDamaged:
                return
