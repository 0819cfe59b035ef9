from __future__ import annotations

from kvblend.store.aside import Aside
from kvblend.store.disk import ScanReport
from kvblend.store.format import KVShape
from kvblend.store.index import ChunkIndex, IndexRow
from kvblend.store.keys import ChunkKey, pack_ids
from kvblend.store.limits import StoreLimits
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.reads import LayerReader
from kvblend.store.space import DiskSpace
from kvblend.store.stats import Counts, TenantStats, count_stats
from kvblend.store.store import ChunkStore
from kvblend.store.tasks import TaskSet


def test_a_snapshot_takes_each_number_from_its_owner() -> None:
    pool = HostPool(100)
    pool.add(PoolEntry.filled(ChunkKey.of("fp", "", (), (1,)), pack_ids((1,)), [memoryview(bytes(10))]), pins=1)
    reader = LayerReader(pool, TaskSet(), lambda _, __: None)
    reader.layers_read, reader.bytes_read = 3, 33
    counts = Counts(leases=1, hits_host=2, hits_disk=3, misses=4, writes=5, writes_failed=6, damaged=7, foreign=8)
    index = ChunkIndex({b"a": IndexRow(1, 11), b"b": IndexRow(1, 22)})
    stats = count_stats(counts, index, DiskSpace(index, 50), pool, reader, aside=Aside(9, 99))
    assert (stats.chunks, stats.disk_bytes, stats.disk_bytes_budget) == (2, 33, 50)
    assert stats.tenants == {"-": TenantStats(2, 33, 0)}
    assert (stats.host_chunks, stats.host_bytes, stats.host_bytes_budget, stats.pinned_bytes) == (1, 10, 100, 10)
    assert (stats.leases, stats.hits_host, stats.hits_disk, stats.misses) == (1, 2, 3, 4)
    assert (stats.writes, stats.writes_failed, stats.layers_read, stats.bytes_read) == (5, 6, 3, 33)
    assert (stats.evictions, stats.damaged, stats.foreign) == (0, 7, 8)
    assert (stats.aside_files, stats.aside_bytes) == (9, 99)


def test_without_a_disk_the_pool_is_counted() -> None:
    store = ChunkStore(KVShape(1, 1, 1, "float32"), "fp", StoreLimits(100), None, ScanReport())
    assert (store.stats().chunks, store.stats().disk_bytes) == (0, 0)
