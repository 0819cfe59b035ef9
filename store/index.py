"""Which chunks lie on disk, answered from memory."""

from __future__ import annotations

from typing import NamedTuple


class IndexRow(NamedTuple):
    """What memory keeps of a chunk on disk: its length in tokens and its file's size in bytes."""

    num_tokens: int
    file_bytes: int


class ChunkIndex:
    """Rows by chunk digest. A chunk that is stored anew gets a new row object, so `is` tells the two apart."""

    def __init__(self, rows: dict[bytes, IndexRow]) -> None:
        """Takes `rows` over."""
        self._rows = rows
        self.file_bytes = sum(row.file_bytes for row in rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def get(self, digest: bytes) -> IndexRow | None:
        """The row of a chunk, or None."""
        return self._rows.get(digest)

    def add(self, digest: bytes, row: IndexRow) -> None:
        """List a chunk, in place of an older row of it."""
        self.remove(digest)
        self._rows[digest] = row
        self.file_bytes += row.file_bytes

    def remove(self, digest: bytes) -> bool:
        """Unlist a chunk; False when it was not listed."""
        row = self._rows.pop(digest, None)
        if row is None:
            return False
        self.file_bytes -= row.file_bytes
        return True
