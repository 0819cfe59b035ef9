from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.format import ChunkHeader, KVShape, build_header, checksum
from kvblend.store.keys import ChunkKey, pack_ids
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.tiers import LayerRun, read_side_by_side

if TYPE_CHECKING:
    from tests.store.conftest import Make


class NoSource:
    async def read_layers(self, header: ChunkHeader, data: memoryview, first: int, stop: int) -> None:
        raise OSError("nothing is read in these tests")

    async def read_runs(self, runs: Sequence[LayerRun]) -> list[Exception | None]:
        return await read_side_by_side(self, runs)


def entry(number: int, num_bytes: int = 10) -> PoolEntry:
    ids = (number,)
    return PoolEntry.filled(ChunkKey.of("fp", "", (), ids), pack_ids(ids), [memoryview(bytearray(num_bytes))])


def holds(pool: HostPool, *entries: PoolEntry) -> list[bool]:
    return [pool.get(one.key.digest) is one for one in entries]


def test_the_least_recently_used_goes_first() -> None:
    pool, (a, b, c) = HostPool(20), map(entry, range(3))
    pool.add(a)
    pool.add(b)
    pool.pin(a)
    pool.unpin(a)
    pool.add(c)
    assert holds(pool, a, b, c) == [True, False, True]
    assert (pool.num_bytes, pool.evictions) == (20, 1)


def test_pinned_entries_stay_and_may_exceed_the_budget() -> None:
    pool, (a, b, c) = HostPool(20), map(entry, range(3))
    for one in (a, b, c):
        pool.add(one, pins=1)
    assert holds(pool, a, b, c) == [True, True, True]
    assert (pool.num_bytes, pool.pinned_bytes) == (30, 30)


def test_the_last_unpin_brings_the_pool_back_under_its_budget() -> None:
    pool, (a, b, c) = HostPool(20), map(entry, range(3))
    for one in (a, b, c):
        pool.add(one, pins=2)
    pool.unpin(b)
    assert holds(pool, b) == [True]
    pool.unpin(b)
    assert holds(pool, a, b, c) == [True, False, True]


def test_an_entry_above_the_budget_does_not_stay() -> None:
    pool, a = HostPool(5), entry(0)
    pool.add(a)
    assert holds(pool, a) == [False]
    assert pool.num_bytes == 0


def test_fits_looks_at_pinned_bytes_only() -> None:
    pool = HostPool(20)
    pool.add(entry(0))
    pool.add(entry(1), pins=1)
    assert [pool.fits(10), pool.fits(11)] == [True, False]


def test_the_least_worth_goes_first_where_that_is_the_policy() -> None:
    pool, (a, b, c) = HostPool(20, "cost"), map(entry, range(3))
    a.cost_s, c.cost_s = 1.0, 2.0
    pool.add(a)
    pool.add(b)  # of unknown cost, so taken to cost little
    pool.add(c)
    assert holds(pool, a, b, c) == [True, False, True]


def test_uses_count_and_pins_alone_do_not() -> None:
    pool, (a, b, c) = HostPool(20, "cost"), map(entry, range(3))
    pool.add(a)
    pool.add(b)
    pool.use(a)
    for _ in range(5):
        pool.pin(b)
        pool.unpin(b)
    pool.add(c)
    assert holds(pool, a, b) == [True, False]


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_a_demoted_entry_goes_first(policy: str) -> None:
    pool, (a, b, c) = HostPool(20, policy), map(entry, range(3))
    pool.add(a)
    pool.add(b)
    pool.demote(b.key.digest)
    pool.add(c)
    assert holds(pool, a, b, c) == [True, False, True]


class Watch:
    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []

    def hold(self, digest: bytes) -> None:
        self.heard.append(("hold", digest))

    def free(self, digest: bytes) -> None:
        self.heard.append(("free", digest))


def test_the_watch_hears_of_first_pins_and_last_unpins() -> None:
    watch = Watch()
    pool, a, digest = HostPool(20, watch=watch), entry(0), entry(0).key.digest
    pool.add(a)
    pool.pin(a)
    pool.pin(a)
    pool.unpin(a)
    assert watch.heard == [("hold", digest)]
    pool.unpin(a)
    assert watch.heard == [("hold", digest), ("free", digest)]
    pool.pin(a)
    pool.drop(digest)
    pool.unpin(a)
    assert watch.heard[2:] == [("hold", digest), ("free", digest)]


def test_an_entry_above_the_budget_drives_nobody_out() -> None:
    pool, a = HostPool(20), entry(0)
    pool.add(a)
    pool.add(entry(1, 21))
    assert (holds(pool, a), pool.evictions) == ([True], 0)


async def test_waiting_for_room_ends_when_a_pin_goes() -> None:
    pool, a = HostPool(10), entry(0)
    pool.add(a, pins=1)
    waiting = asyncio.create_task(pool.wait_until_fits(10, 60.0))
    await asyncio.sleep(0)
    pool.unpin(a)
    assert await waiting
    pool.pin(a)
    assert not await pool.wait_until_fits(10, 0.01)
    assert not await pool.wait_until_fits(11, 60.0)


def test_evicting_spares_pinned_entries() -> None:
    pool, a, b = HostPool(20), entry(0), entry(1)
    pool.add(a)
    pool.add(b, pins=1)
    assert [pool.evict(one.key.digest) for one in (a, a, b)] == [True, False, False]


def test_a_dropped_entry_is_not_found_and_can_be_unpinned() -> None:
    pool, a = HostPool(20), entry(0)
    pool.add(a, pins=1)
    assert pool.drop(a.key.digest) is a
    assert (len(pool), pool.num_bytes, pool.pinned_bytes) == (0, 0, 0)
    pool.unpin(a)
    assert (a.pins, pool.num_bytes) == (0, 0)


def test_unpinning_a_dropped_entry_leaves_its_successor_alone() -> None:
    pool, old, new = HostPool(20), entry(0), entry(0)
    pool.add(old, pins=1)
    pool.drop(old.key.digest)
    pool.add(new, pins=1)
    pool.unpin(old)
    assert holds(pool, new) == [True]
    pool.validate()


def test_adding_a_chunk_twice_is_refused() -> None:
    pool = HostPool(20)
    pool.add(entry(0))
    with pytest.raises(ValueError, match="already"):
        pool.add(entry(0))


def test_unpinning_without_a_pin_is_refused() -> None:
    with pytest.raises(ValueError, match="not pinned"):
        HostPool(20).unpin(entry(0))


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_below_one_byte_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"host_bytes_budget is {budget}"):
        HostPool(budget)


def test_validate_notices_wrong_sums() -> None:
    pool = HostPool(20)
    pool.num_bytes = 3
    with pytest.raises(RuntimeError, match="bytes are those of the entries"):
        pool.validate()


def test_layers_become_ready_in_their_places(sample: Make, shape: KVShape) -> None:
    one = sample()
    header, _ = build_header(one.key, pack_ids(one.ids), shape, [checksum(layer) for layer in one.layers])
    data = memoryview(bytearray(header.data_bytes))
    for span, layer in zip(header.layers, one.layers, strict=True):
        data[span.offset : span.offset + span.length] = layer
    made = PoolEntry.empty(header, data, NoSource(), "disk")
    made.mark_ready(1, 3)
    assert [layer is None for layer in made.layers] == [True, False, False, True]
    assert bytes(made.layers[2] or b"") == one.layers[2]
    assert not made.is_ready


def test_an_entry_without_a_file_cannot_become_ready() -> None:
    with pytest.raises(ValueError, match="without a file"):
        entry(0).mark_ready(0, 1)


steps = st.lists(st.tuples(st.sampled_from(["add", "pin", "unpin", "evict", "drop"]), st.integers(0, 5)), max_size=60)


@given(steps, st.integers(1, 60))
def test_the_rules_hold_after_any_steps(steps: list[tuple[str, int]], budget: int) -> None:
    pool = HostPool(budget)
    pinned: list[PoolEntry] = []
    for step, number in steps:
        digest = entry(number).key.digest
        found = pool.get(digest)
        if step == "add" and found is None:
            pool.add(entry(number, 5 + number))
        elif step == "pin" and found is not None:
            pool.pin(found)
            pinned.append(found)
        elif step == "unpin" and pinned:
            pool.unpin(pinned.pop(number % len(pinned)))
        elif step == "evict":
            pool.evict(digest)
        elif step == "drop":
            pool.drop(digest)
            pinned_now = {id(one) for one in pinned}
            assert found is None or (id(found) in pinned_now) == bool(found.pins)
        pool.validate()
