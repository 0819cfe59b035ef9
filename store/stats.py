"""Numbers a store tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvblend.store.index import ChunkIndex
from kvblend.store.pool import HostPool
from kvblend.store.reads import LayerReader


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A moment's state and the counts since the store was opened. All `*_bytes` are bytes.

    `host_bytes` may exceed the budget by leased data only. `damaged` counts chunks found unreadable, at the start or
    later; `foreign` counts files of another model, shape or version, which are left alone. `hits_*` and `misses` count
    calls of `lease`.
    """

    chunks: int
    disk_bytes: int
    host_chunks: int
    host_bytes: int
    host_bytes_budget: int
    pinned_bytes: int
    leases: int
    hits_host: int
    hits_disk: int
    misses: int
    writes: int
    writes_failed: int
    layers_read: int
    bytes_read: int
    evictions: int
    damaged: int
    foreign: int


@dataclass(slots=True)
class Counts:
    """What only the store itself can count; `leases` is how many are out."""

    leases: int = 0
    hits_host: int = 0
    hits_disk: int = 0
    misses: int = 0
    writes: int = 0
    writes_failed: int = 0
    damaged: int = 0
    foreign: int = 0


def count_stats(
    counts: Counts, index: ChunkIndex, pool: HostPool, reader: LayerReader, *, has_disk: bool
) -> StoreStats:
    """One snapshot of a store's parts; without a disk, its chunks are those in the pool."""
    return StoreStats(
        chunks=len(index) if has_disk else len(pool),
        disk_bytes=index.file_bytes,
        host_chunks=len(pool),
        host_bytes=pool.num_bytes,
        host_bytes_budget=pool.bytes_budget,
        pinned_bytes=pool.pinned_bytes,
        leases=counts.leases,
        hits_host=counts.hits_host,
        hits_disk=counts.hits_disk,
        misses=counts.misses,
        writes=counts.writes,
        writes_failed=counts.writes_failed,
        layers_read=reader.layers_read,
        bytes_read=reader.bytes_read,
        evictions=pool.evictions,
        damaged=counts.damaged,
        foreign=counts.foreign,
    )
