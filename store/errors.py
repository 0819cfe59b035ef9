"""What can go wrong with bytes at rest, as exceptions."""

from __future__ import annotations

import errno


class StoreError(Exception):
    """Anything this room raises on purpose, except ValueError for arguments that contradict each other."""


class StoreUnusable(StoreError):
    """The store's folder cannot be used; the message names the path and the reason, and nothing was changed there."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"store folder {path}: {reason}")
        self.path = path
        self.reason = reason


class StoreWriteFailed(StoreError):
    """A chunk could not be made durable; nothing of it is visible. The store goes on."""


class SpillFailed(StoreError):
    """A chunk was to leave the disk, and the tier below did not take it; it stays."""


class ChunkError(StoreError):
    """A chunk file that cannot be used; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ChunkDamaged(ChunkError):
    """The bytes are not what was written, or could not be read. For the caller: a miss."""


class ForeignFile(ChunkError):
    """Not a chunk of this store: another kind of file, another format version, another model or shape."""


class OldFile(ForeignFile):
    """A chunk of an older format version that nobody asks for any more: it is never read again."""

    def __init__(self, reason: str, version: int) -> None:
        super().__init__(reason)
        self.version = version


_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def is_shortage(error: Exception) -> bool:
    """Whether this process or machine was short of something: of the file that was to be read it says nothing."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES
