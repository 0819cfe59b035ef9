"""Putting chunks into stores that have no room left, and into stores whose only lower tier is a remote one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_remote import FakeRemote
from store_steps import FILE_BYTES

from kvblend.store.errors import StoreWriteFailed
from kvblend.store.format import KVShape
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample


async def put(store: ChunkStore, *samples: Sample, cost_s: float = 0.0) -> list[bool]:
    return [await store.put(one.key, one.ids, one.layers, cost_s=cost_s) for one in samples]


async def leased(store: ChunkStore, one: Sample) -> ChunkLease:
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    return lease


def files(root: Path) -> int:
    return len(list(root.rglob("*.kvc")))


async def test_the_disk_budget_holds_on_disk(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path, disk_bytes_budget=3 * FILE_BYTES + 100, disk_policy="lru")
    await put(store, *(sample(number) for number in range(5)))
    assert [store.contains(sample(number).key) for number in range(5)] == [False, False, True, True, True]
    assert await asyncio.to_thread(files, tmp_path) == 3
    assert (store.stats().disk_bytes, store.stats().evictions_disk) == (3 * FILE_BYTES, 2)


async def test_the_cheapest_to_compute_leaves_the_disk_first(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, disk_bytes_budget=2 * FILE_BYTES)
    await put(store, sample(0), cost_s=3.0)
    await put(store, sample(1), cost_s=0.5)
    await put(store, sample(2), cost_s=1.0)
    assert [store.contains(sample(number).key) for number in range(3)] == [True, False, True]


async def test_costs_and_uses_outlive_a_restart(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample(0), sample(1), cost_s=1.0)
    for _ in range(3):
        (await leased(store, sample(0))).release()
    await store.close()
    store = await open_store(tmp_path, disk_bytes_budget=2 * FILE_BYTES)
    await put(store, sample(2), cost_s=1.0)
    assert [store.contains(sample(number).key) for number in range(3)] == [True, False, True]


async def test_leased_chunks_stay_on_disk(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")
    await put(store, sample(0), sample(1))
    with await leased(store, sample(0)):
        await put(store, sample(2))
        assert [store.contains(sample(number).key) for number in range(3)] == [True, False, True]
    await put(store, sample(3), sample(4))
    assert not store.contains(sample(0).key)


async def test_when_all_is_leased_a_put_waits_and_then_fails(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, disk_bytes_budget=FILE_BYTES)
    await put(store, sample(0))
    with await leased(store, sample(0)), pytest.raises(StoreWriteFailed, match=f"{FILE_BYTES} are leased"):
        await put(store, sample(1))
    assert store.stats().writes_failed == 1
    assert await put(store, sample(1)) == [True]


@pytest.mark.parametrize("has_folder", [True, False])
async def test_a_put_goes_on_when_a_lease_is_given_back(
    open_store: OpenStore, sample: Make, tmp_path: Path, has_folder: bool
) -> None:
    store = await open_store(
        tmp_path if has_folder else None, disk_bytes_budget=FILE_BYTES, budget=sample().num_bytes, wait_s=60.0
    )
    await put(store, sample(0))
    lease = await leased(store, sample(0))
    putting = asyncio.create_task(put(store, sample(1)))
    await asyncio.sleep(0)
    lease.release()
    assert await putting == [True]
    assert store.contains(sample(1).key)


async def test_a_chunk_being_written_counts(open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path) -> None:
    store = await open_store(tmp_path, io, disk_bytes_budget=FILE_BYTES)
    io.gate("write_file")
    putting = asyncio.create_task(put(store, sample(0)))
    await io.arrived["write_file"].acquire()
    with pytest.raises(StoreWriteFailed, match="being written"):
        await put(store, sample(1))
    io.open_gate("write_file")
    assert await putting == [True]


async def test_a_failed_write_gives_its_room_back(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io, disk_bytes_budget=FILE_BYTES)
    io.fail("write_file", OSError(28, "No space left on device"))
    with pytest.raises(StoreWriteFailed):
        await put(store, sample(0))
    assert await put(store, sample(0)) == [True]


async def test_a_tenant_beyond_its_quota_loses_its_own_chunks(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, tenant_bytes_max=2 * FILE_BYTES)
    await put(store, sample(0, salt="ann"), sample(0, salt="bob"), sample(1, salt="ann"), sample(2, salt="ann"))
    known = [store.contains(sample(number, salt="ann").key) for number in range(3)]
    assert known == [False, True, True]
    assert store.contains(sample(0, salt="bob").key)
    figures = sorted((use.chunks, use.disk_bytes, use.evictions) for use in store.stats().tenants.values())
    assert figures == [(1, FILE_BYTES, 0), (2, 2 * FILE_BYTES, 1)]


async def test_a_quota_holds_after_a_restart(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, *(sample(number, salt="ann") for number in range(3)))
    await store.close()
    store = await open_store(tmp_path, tenant_bytes_max=2 * FILE_BYTES)
    await put(store, sample(3, salt="ann"))
    assert store.stats().disk_bytes == 2 * FILE_BYTES


async def test_a_store_beyond_a_lowered_budget_is_trimmed_when_it_is_opened(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path)
    await put(store, *(sample(number) for number in range(4)))
    await store.close()
    store = await open_store(tmp_path, disk_bytes_budget=2 * FILE_BYTES)
    await store._tasks.drain()
    assert store.stats().disk_bytes == 2 * FILE_BYTES


async def test_without_a_folder_the_policy_of_memory_decides(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None, budget=2 * sample().num_bytes, host_policy="cost")
    await put(store, sample(0), cost_s=3.0)
    await put(store, sample(1), cost_s=0.5)
    await put(store, sample(2), cost_s=1.0)
    assert [store.contains(sample(number).key) for number in range(3)] == [True, False, True]


async def test_a_new_chunk_stays_in_memory_however_cheap_it_is(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None, budget=2 * sample().num_bytes, host_policy="cost")
    await put(store, sample(0), sample(1), cost_s=3.0)
    await put(store, sample(2), cost_s=0.001)
    assert store.contains(sample(2).key)


@pytest.mark.parametrize("cost_s", [-1.0, float("nan"), float("inf")])
async def test_a_cost_that_is_no_number_of_seconds_is_refused(
    open_store: OpenStore, sample: Make, cost_s: float
) -> None:
    store = await open_store(None)
    with pytest.raises(ValueError, match="cost_s is"):
        await put(store, sample(), cost_s=cost_s)


async def test_without_a_folder_a_chunk_is_stored_when_the_remote_tier_has_it(
    open_store: OpenStore, sample: Make, shape: KVShape
) -> None:
    remote = FakeRemote(shape)
    store = await open_store(None, remote=remote)
    await put(store, sample())
    assert set(remote.chunks) == {sample().key.digest}
    store.evict_nowait(sample().key.id)
    assert (await leased(store, sample())).tier == "remote"


async def test_without_a_folder_memory_keeps_what_the_remote_tier_does_not_take(
    open_store: OpenStore, sample: Make, shape: KVShape
) -> None:
    remote = FakeRemote(shape)
    remote.broken = ConnectionError("gone")
    store = await open_store(None, remote=remote)
    assert await put(store, sample()) == [True]
    assert (await leased(store, sample())).tier == "host"
    assert (store.stats().remote_failed, store.stats().remote_writes) == (1, 0)
