"""Which chunks lie on disk, answered from memory."""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvblend.store.keys import ChunkKey, tag_of


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """While many objects are made that stay, the garbage collector would only look at all others in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


RemoteCopy = Literal["unknown", "owed", "there"]
"""`owed`: it was stored here by this process, and the copy has still to be made."""


@dataclass(slots=True)
class IndexRow:
    """What memory keeps of a chunk on disk: its length in tokens, its file's size in bytes, whose it is (`tag_of`
    its tenant), the seconds that computing it took (0: not known), how often it was leased, when it was stored and last
    used (seconds since the epoch), and whether the remote tier has it, as far as this process knows.
    """

    num_tokens: int
    file_bytes: int
    tenant: str = tag_of("")
    cost_s: float = field(default=0.0, compare=False)
    hits: int = field(default=0, compare=False)
    created_s: float = field(default=0.0, compare=False)
    used_s: float = field(default=0.0, compare=False)
    remote: RemoteCopy = field(default="unknown", compare=False)

    @classmethod
    def of(cls, key: ChunkKey, num_tokens: int, file_bytes: int) -> IndexRow:
        """The row of a chunk of which nothing but its header is known."""
        return cls(num_tokens, file_bytes, tag_of(key.tenant))


@dataclass(slots=True)
class TenantUse:
    """What one tenant has on disk."""

    chunks: int = 0
    file_bytes: int = 0


class ChunkIndex:
    """Rows by chunk digest. A chunk that is stored anew gets a new row object, so `is` tells the two apart."""

    def __init__(self, rows: dict[bytes, IndexRow]) -> None:
        """Takes `rows` over."""
        self._rows = rows
        self.file_bytes = 0
        self._tenants: dict[str, TenantUse] = {}
        by_tenant: defaultdict[str, list[int]] = defaultdict(list)
        for row in rows.values():
            by_tenant[row.tenant].append(row.file_bytes)
        for tenant, sizes in by_tenant.items():
            self._tenants[tenant] = TenantUse(len(sizes), sum(sizes))
            self.file_bytes += sum(sizes)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    @property
    def rows(self) -> Mapping[bytes, IndexRow]:
        """All rows; for reading only."""
        return self._rows

    @property
    def tenants(self) -> Mapping[str, TenantUse]:
        """The tenants that have chunks on disk, by tag; for reading only."""
        return self._tenants

    def get(self, digest: bytes) -> IndexRow | None:
        """The row of a chunk, or None."""
        return self._rows.get(digest)

    def tenant_bytes(self, tenant: str) -> int:
        """Bytes that a tenant has on disk."""
        use = self._tenants.get(tenant)
        return use.file_bytes if use is not None else 0

    def add(self, digest: bytes, row: IndexRow) -> None:
        """List a chunk, in place of an older row of it."""
        self.remove(digest)
        self._rows[digest] = row
        self._count(row)

    def remove(self, digest: bytes) -> bool:
        """Unlist a chunk; False when it was not listed."""
        row = self._rows.pop(digest, None)
        if row is None:
            return False
        self.file_bytes -= row.file_bytes
        use = self._tenants[row.tenant]
        use.chunks -= 1
        use.file_bytes -= row.file_bytes
        if not use.chunks:
            del self._tenants[row.tenant]
        return True

    def _count(self, row: IndexRow) -> None:
        self.file_bytes += row.file_bytes
        use = self._tenants.get(row.tenant)
        if use is None:
            use = self._tenants[row.tenant] = TenantUse()
        use.chunks += 1
        use.file_bytes += row.file_bytes
