from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fake_remote import FakeRemote

from kvblend.store.format import KVShape
from kvblend.store.keys import pack_ids
from kvblend.store.tiers import LowerTier

if TYPE_CHECKING:
    from tests.store.conftest import Make, OpenStore


async def test_a_lease_says_in_which_tier_the_chunk_was(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    remote = FakeRemote(shape)
    tier: LowerTier = remote
    remote.keep(sample(2).key, pack_ids(sample(2).ids), sample(2).layers)
    store = await open_store(tmp_path, remote=tier)
    for number in (0, 1):
        await store.put(sample(number).key, sample(number).ids, sample(number).layers)
    store.evict_nowait(sample(1).key.id)
    tiers = []
    for number in range(3):
        lease = await store.lease(sample(number).key, sample(number).ids)
        assert lease is not None
        tiers.append(lease.tier)
        lease.release()
    assert tiers == ["host", "disk", "remote"]
    stats = store.stats()
    assert (stats.hits_host, stats.hits_disk, stats.hits_remote, stats.misses) == (1, 1, 1, 0)


async def test_the_remote_tier_is_closed_with_the_store(open_store: OpenStore, shape: KVShape, tmp_path: Path) -> None:
    remote = FakeRemote(shape)
    store = await open_store(tmp_path, remote=remote)
    await store.close()
    assert remote.closed
