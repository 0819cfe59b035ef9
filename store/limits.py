"""How much a store may keep, and who goes when that is reached."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvblend.store.errors import StoreUnusable
from kvblend.store.eviction import POLICIES

WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Byte budgets of host memory, of the folder (None: no limit) and of each tenant's files in it (None: no limit),
    and the eviction policies (`POLICIES`). `wait_s` is how long a write waits for leased chunks to be given back.

    Raises ValueError naming the field that is out of its range, or beyond this machine's memory.
    """

    host_bytes_budget: int
    disk_bytes_budget: int | None = None
    host_policy: str = "lru"
    disk_policy: str = "cost"
    tenant_bytes_max: int | None = None
    wait_s: float = WAIT_S

    def __post_init__(self) -> None:
        for name in ("host_bytes_budget", "disk_bytes_budget", "tenant_bytes_max"):
            value = getattr(self, name)
            if value is None and name != "host_bytes_budget":
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be at least 1")
        for name in ("host_policy", "disk_policy"):
            if getattr(self, name) not in POLICIES:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose {', '.join(POLICIES)}")
        if self.host_bytes_budget > (memory := memory_bytes()):
            raise ValueError(
                f"host_bytes_budget is {self.host_bytes_budget}; this machine has {memory} bytes of memory"
            )

    def check_folder(self, root: Path) -> None:
        """Raises StoreUnusable where the file system under `root` is smaller than its budget. Blocks; OSError too."""
        if self.disk_bytes_budget is None:
            return
        figures = os.statvfs(root)
        size = figures.f_blocks * figures.f_frsize
        # some file systems do not know their size
        if 0 < size < self.disk_bytes_budget:
            raise StoreUnusable(
                root, f"disk_bytes_budget is {self.disk_bytes_budget}; the file system there has {size} bytes"
            )


def memory_bytes() -> int:
    """How much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
