from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.errors import SpillFailed, StoreWriteFailed
from kvblend.store.index import ChunkIndex, IndexRow
from kvblend.store.space import DiskSpace


class Desk:
    """A space over an index, with an eviction that only keeps the books."""

    def __init__(self, budget: int | None = None, tenant_max: int | None = None, policy: str = "lru") -> None:
        self.index = ChunkIndex({})
        self.space = DiskSpace(self.index, budget, policy, tenant_max)
        self.gone: list[bytes] = []
        self.stuck: set[bytes] = set()

    def add(self, digest: bytes, size: int, tenant: str = "t", cost_s: float = 0.0) -> None:
        row = IndexRow(1, size, tenant, cost_s)
        self.index.add(digest, row)
        self.space.add(digest, row)

    async def evict(self, digest: bytes) -> bool:
        row = self.index.get(digest)
        assert row is not None
        self.index.remove(digest)
        self.space.discard(digest, row)
        await asyncio.sleep(0)
        if digest in self.stuck:
            self.add(digest, row.file_bytes, row.tenant)
            return False
        self.gone.append(digest)
        return True

    async def keep(self, digest: bytes) -> bool:
        """An eviction that finds no place below for some."""
        if digest in self.stuck:
            raise SpillFailed("no copy")
        return await self.evict(digest)

    async def reserve(self, size: int, tenant: str = "t", wait_s: float = 0.0) -> None:
        await self.space.reserve("new", tenant, size, wait_s, self.evict)


async def test_without_limits_everything_has_room() -> None:
    desk = Desk()
    desk.add(b"a", 1 << 40)
    await desk.reserve(1 << 50)
    assert desk.gone == []


async def test_the_least_recently_used_goes_until_there_is_room() -> None:
    desk = Desk(100)
    for name in (b"a", b"b", b"c"):
        desk.add(name, 30)
    row = desk.index.get(b"a")
    assert row is not None
    desk.space.use(b"a", row)
    await desk.reserve(50)
    assert desk.gone == [b"b", b"c"]
    assert (desk.space.evictions, desk.space.tenant_evictions["t"]) == (2, 2)


async def test_the_cheapest_goes_where_that_is_the_policy() -> None:
    desk = Desk(100, policy="cost")
    desk.add(b"dear", 40, cost_s=5.0)
    desk.add(b"cheap", 40, cost_s=0.1)
    await desk.reserve(40)
    assert desk.gone == [b"cheap"]


async def test_a_chunk_of_unknown_cost_is_taken_to_cost_what_others_do() -> None:
    desk = Desk(100, policy="cost")
    desk.add(b"dear", 40, cost_s=5.0)
    desk.add(b"unknown", 20)
    desk.add(b"cheap", 40, cost_s=0.1)
    await desk.reserve(10)
    assert desk.gone == [b"cheap"]


async def test_what_is_reserved_counts() -> None:
    desk = Desk(100)
    await desk.reserve(60)
    with pytest.raises(StoreWriteFailed, match="chunk new takes 60 bytes; of the 100 of disk_bytes_budget, 60 are"):
        await desk.reserve(60)
    desk.space.release("t", 60)
    await desk.reserve(60)
    assert desk.space.reserved_bytes == 60


async def test_what_exceeds_the_whole_limit_evicts_nobody() -> None:
    desk = Desk(100, 50)
    desk.add(b"a", 30)
    with pytest.raises(StoreWriteFailed, match="chunk new takes 101 bytes; disk_bytes_budget is 100"):
        await desk.reserve(101)
    with pytest.raises(StoreWriteFailed, match="chunk new takes 51 bytes; tenant_bytes_max is 50"):
        await desk.reserve(51)
    assert (desk.gone, desk.space.reserved_bytes) == ([], 0)


async def test_nobody_goes_for_a_chunk_that_would_not_fit_all_the_same() -> None:
    desk = Desk(100)
    desk.add(b"held", 60)
    desk.add(b"free", 30)
    desk.space.hold(b"held")
    with pytest.raises(StoreWriteFailed, match="60 are leased"):
        await desk.reserve(50)
    assert desk.gone == []


async def test_a_lease_given_back_in_time_makes_room() -> None:
    desk = Desk(100)
    desk.add(b"a", 80)
    desk.space.hold(b"a")
    waiting = asyncio.create_task(desk.reserve(50, wait_s=60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    desk.space.free(b"a")
    await waiting
    assert desk.gone == [b"a"]


async def test_a_smaller_chunk_passes_a_waiting_one() -> None:
    desk = Desk(100)
    desk.add(b"a", 50)
    desk.space.hold(b"a")
    waiting = asyncio.create_task(desk.reserve(60, wait_s=60.0))
    await asyncio.sleep(0)
    await desk.reserve(50)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert desk.space.reserved_bytes == 50


async def test_many_who_wait_in_vain_all_end() -> None:
    desk = Desk(100)
    desk.add(b"a", 100)
    desk.space.hold(b"a")
    ends = await asyncio.gather(*(desk.reserve(10, wait_s=0.02) for _ in range(20)), return_exceptions=True)
    assert all(isinstance(end, StoreWriteFailed) for end in ends)
    assert desk.space.reserved_bytes == 0


async def test_a_tenant_pays_with_its_own_chunks() -> None:
    desk = Desk(1000, 100)
    desk.add(b"old", 90, "other")
    desk.add(b"mine", 80, "mine")
    await desk.reserve(50, "mine")
    assert desk.gone == [b"mine"]
    assert desk.space.tenant_evictions == {"mine": 1}


async def test_a_tenant_whose_chunks_are_leased_does_not_make_others_pay() -> None:
    desk = Desk(1000, 100)
    desk.add(b"other", 90, "other")
    desk.add(b"mine", 80, "mine")
    desk.space.hold(b"mine")
    with pytest.raises(StoreWriteFailed, match="of the 100 of tenant_bytes_max, 80 are"):
        await desk.reserve(50, "mine")
    assert desk.gone == []


async def test_a_tenants_chunks_do_not_go_where_the_other_limit_stands_in_the_way() -> None:
    desk = Desk(100, 60)
    desk.add(b"other", 60, "other")
    desk.add(b"free", 20, "mine")
    desk.add(b"held", 20, "mine")
    desk.space.hold(b"other")
    desk.space.hold(b"held")
    with pytest.raises(StoreWriteFailed, match="disk_bytes_budget"):
        await desk.reserve(30, "mine")
    assert desk.gone == []


async def test_files_that_cannot_be_removed_end_in_an_error() -> None:
    desk = Desk(100)
    for name in (b"a", b"b", b"c", b"d"):
        desk.add(name, 25)
    desk.stuck = {b"a", b"b", b"c"}
    with pytest.raises(StoreWriteFailed, match="3 files could not be removed"):
        await desk.reserve(25)
    assert (desk.index.file_bytes, desk.space.reserved_bytes, desk.gone) == (100, 0, [])
    await desk.reserve(25)
    assert desk.gone == [b"d"]


async def test_two_at_once_do_not_count_on_the_same_room() -> None:
    desk = Desk(100)
    for name in (b"a", b"b", b"c", b"d"):
        desk.add(name, 25)
    await asyncio.gather(desk.reserve(25), desk.reserve(25))
    assert desk.gone == [b"a", b"b"]


async def test_a_store_beyond_its_limits_is_trimmed() -> None:
    rows = {b"%d" % number: IndexRow(1, 30, "ab"[number % 2], used_s=float(number)) for number in range(6)}
    desk = Desk()
    desk.index = ChunkIndex(rows)
    desk.space = DiskSpace(desk.index, 100, "lru", 60)
    await desk.space.trim(desk.evict)
    assert desk.gone == [b"0", b"1", b"2"]


@pytest.mark.parametrize("limits", [(0, None), (None, -5)])
def test_a_limit_below_one_byte_is_refused(limits: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        DiskSpace(ChunkIndex({}), limits[0], "lru", limits[1])


steps = st.lists(
    st.tuples(st.sampled_from(["put", "put", "hold", "free", "drop"]), st.integers(0, 7), st.integers(1, 40)),
    max_size=40,
)


async def live(steps: list[tuple[str, int, int]], policy: str) -> None:
    desk, held = Desk(100, 60, policy), set[bytes]()
    for step, number, size in steps:
        digest, tenant = b"%d" % number, "ab"[number % 2]
        row = desk.index.get(digest)
        if step == "put" and row is None:
            before = set(desk.index.rows)
            try:
                await desk.reserve(size, tenant)
            except StoreWriteFailed:
                assert before == set(desk.index.rows)
                continue
            desk.add(digest, size, tenant)
            desk.space.release(tenant, size)
        elif step == "hold" and row is not None:
            desk.space.hold(digest)
            held.add(digest)
        elif step == "free":
            desk.space.free(digest)
            held.discard(digest)
        elif step == "drop" and row is not None:
            desk.index.remove(digest)
            desk.space.discard(digest, row)
            held.discard(digest)
        assert held <= set(desk.index.rows)
        assert desk.index.file_bytes <= 100
        assert all(use.file_bytes <= 60 for use in desk.index.tenants.values())
        assert desk.space.reserved_bytes == 0


@pytest.mark.parametrize("policy", ["lru", "cost"])
@given(steps=steps)
def test_limits_hold_and_held_chunks_stay_whatever_happens(policy: str, steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(live(steps, policy))


@pytest.mark.parametrize("policy", ["lru", "cost"])
async def test_what_must_stay_is_passed_over_and_stays_in_line(policy: str) -> None:
    desk = Desk(100, policy=policy)
    for name in (b"a", b"b", b"c", b"d"):
        desk.add(name, 25)
    desk.stuck = {b"a", b"b"}
    await desk.space.reserve("new", "t", 25, 0.0, desk.keep)
    desk.space.release("t", 25)
    assert desk.gone == [b"c"]
    desk.stuck.clear()
    await desk.space.reserve("new", "t", 100, 0.0, desk.keep)
    assert sorted(desk.gone) == [b"a", b"b", b"c", b"d"]


async def test_what_must_stay_and_is_used_meanwhile_is_held() -> None:
    desk = Desk(100)
    for name in (b"a", b"b"):
        desk.add(name, 50)
    desk.stuck = {b"a", b"b"}
    desk.space.is_pinned = lambda digest: digest == b"a"
    with pytest.raises(StoreWriteFailed, match="remote tier does not take"):
        await desk.space.reserve("new", "t", 50, 0.0, desk.keep)
    assert desk.space.reserved_bytes == 0
    desk.stuck.clear()
    await desk.space.reserve("new", "t", 50, 0.0, desk.keep)
    assert desk.gone == [b"b"]


async def test_what_is_set_apart_goes_for_nobody_until_it_rejoins() -> None:
    desk = Desk(100)
    for name in (b"a", b"b"):
        desk.add(name, 50)
    row = desk.index.get(b"a")
    assert row is not None
    desk.space.set_apart(b"a", row)
    desk.space.add(b"a", row)
    await desk.reserve(50)
    assert desk.gone == [b"b"]
    desk.space.release("t", 50)
    desk.space.rejoin(b"a")
    await desk.reserve(100)
    assert desk.gone == [b"b", b"a"]
