"""Numbers a store tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvblend.store.aside import NOTHING, Aside
from kvblend.store.index import ChunkIndex, TenantUse
from kvblend.store.pool import HostPool
from kvblend.store.reads import LayerReader
from kvblend.store.space import DiskSpace
from kvblend.store.tiers import Tier


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant has on disk, and how many of its chunks went to make room since the store was opened."""

    chunks: int
    disk_bytes: int
    evictions: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A moment's state and the counts since the store was opened. All `*_bytes` are bytes.

    `host_bytes` may exceed the budget by leased data only. `damaged` counts chunks found unreadable, at the start
    or later, `aside_files` and `aside_bytes` are what is kept of them; `foreign` counts files of another model,
    shape or version, which are left alone. `hits_*` and `misses` count calls of `lease`. `evictions` are those from
    host memory. `remote_waiting` chunks are on their way to the remote tier, `remote_skipped` were not sent because
    too many waited, `remote_lost` left the disk although the remote tier, which failed for long, had no copy.
    `headers_read` counts the files that the start had to open because the index did not know them. `tenants` goes
    by `tenant_tag`. A budget of None is no limit.
    """

    chunks: int
    disk_bytes: int
    disk_bytes_budget: int | None
    tenant_bytes_max: int | None
    host_chunks: int
    host_bytes: int
    host_bytes_budget: int
    pinned_bytes: int
    leases: int
    hits_host: int
    hits_disk: int
    hits_remote: int
    misses: int
    writes: int
    writes_failed: int
    remote_writes: int
    remote_failed: int
    remote_skipped: int
    remote_lost: int
    remote_waiting: int
    layers_read: int
    bytes_read: int
    evictions: int
    evictions_disk: int
    damaged: int
    foreign: int
    headers_read: int
    aside_files: int = 0
    aside_bytes: int = 0
    tenants: Mapping[str, TenantStats] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """What only the store itself can count; `leases` is how many are out."""

    leases: int = 0
    hits_host: int = 0
    hits_disk: int = 0
    hits_remote: int = 0
    misses: int = 0
    writes: int = 0
    writes_failed: int = 0
    remote_writes: int = 0
    remote_failed: int = 0
    remote_skipped: int = 0
    remote_lost: int = 0
    remote_waiting: int = 0
    damaged: int = 0
    foreign: int = 0
    headers_read: int = 0

    def count_lease(self, tier: Tier) -> None:
        """One more lease is out, of a chunk that was in this tier."""
        self.leases += 1
        if tier == "host":
            self.hits_host += 1
        elif tier == "disk":
            self.hits_disk += 1
        else:
            self.hits_remote += 1


def count_stats(
    counts: Counts, index: ChunkIndex, space: DiskSpace, pool: HostPool, reader: LayerReader, aside: Aside | None
) -> StoreStats:
    """One snapshot of a store's parts; without a disk (`aside` None), its chunks are those in the pool."""
    kept = aside or NOTHING
    return StoreStats(
        chunks=len(index) if aside is not None else len(pool),
        disk_bytes=index.file_bytes,
        disk_bytes_budget=space.bytes_budget,
        tenant_bytes_max=space.tenant_bytes_max,
        host_chunks=len(pool),
        host_bytes=pool.num_bytes,
        host_bytes_budget=pool.bytes_budget,
        pinned_bytes=pool.pinned_bytes,
        leases=counts.leases,
        hits_host=counts.hits_host,
        hits_disk=counts.hits_disk,
        hits_remote=counts.hits_remote,
        misses=counts.misses,
        writes=counts.writes,
        writes_failed=counts.writes_failed,
        remote_writes=counts.remote_writes,
        remote_failed=counts.remote_failed,
        remote_skipped=counts.remote_skipped,
        remote_lost=counts.remote_lost,
        remote_waiting=counts.remote_waiting,
        layers_read=reader.layers_read,
        bytes_read=reader.bytes_read,
        evictions=pool.evictions,
        evictions_disk=space.evictions,
        damaged=counts.damaged,
        foreign=counts.foreign,
        headers_read=counts.headers_read,
        aside_files=kept.files,
        aside_bytes=kept.num_bytes,
        tenants=_count_tenants(index, space),
    )


def _count_tenants(index: ChunkIndex, space: DiskSpace) -> dict[str, TenantStats]:
    none = TenantUse()
    uses = {tag: index.tenants.get(tag, none) for tag in sorted({*index.tenants, *space.tenant_evictions})}
    return {tag: TenantStats(use.chunks, use.file_bytes, space.tenant_evictions[tag]) for tag, use in uses.items()}
