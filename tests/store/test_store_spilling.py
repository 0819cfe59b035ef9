"""Chunks that leave the disk where there is a remote tier: not before it has them, unless it fails for long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_remote import FakeRemote
from store_steps import FILE_BYTES, keep, put, read_all

from kvblend.store import copies
from kvblend.store.errors import StoreWriteFailed
from kvblend.store.format import KVShape
from kvblend.store.keys import ChunkKey

if TYPE_CHECKING:
    from tests.store.conftest import Make, OpenStore


@pytest.fixture
def remote(shape: KVShape) -> FakeRemote:
    return FakeRemote(shape)


async def test_a_chunk_whose_copy_fails_stays_on_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")
    remote.broken = TimeoutError("too slow")
    await put(store, sample(0), sample(1))
    with pytest.raises(StoreWriteFailed, match="the remote tier does not take what would go"):
        await put(store, sample(2))
    assert [store.contains(sample(number).key) for number in range(3)] == [True, True, False]
    assert (store.stats().disk_bytes, store.stats().remote_lost) == (2 * FILE_BYTES, 0)
    remote.broken = None
    await put(store, sample(2))
    assert [store.contains(sample(number).key) for number in range(3)] == [False, True, True]
    assert await read_all(store, sample(0)) == sample(0).layers


async def test_another_chunk_goes_in_place_of_one_whose_copy_fails(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")
    remote.broken = TimeoutError("too slow")
    await put(store, sample(0))
    await store._copies.close(1.0)
    remote.broken = None
    store._copies.closed = False
    await put(store, sample(1))
    await store._copies.close(1.0)
    remote.broken = TimeoutError("too slow")
    await put(store, sample(2))
    assert [store.contains(sample(number).key) for number in range(3)] == [True, False, True]


class Recovering(FakeRemote):
    """Takes nothing at first; the third write is well."""

    async def write(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview]) -> None:
        if self.calls.count("write") < 2:
            self.calls.append("write")
            raise TimeoutError("too slow")
        await super().write(key, packed_ids, layers)


async def test_a_put_tries_again_until_its_time_is_over(
    open_store: OpenStore, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    remote = Recovering(shape)
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=FILE_BYTES, wait_s=60.0)
    await put(store, sample(0), sample(1))
    assert [store.contains(sample(number).key) for number in range(2)] == [False, True]
    assert sample(0).key.digest in remote.chunks


async def test_two_puts_that_try_again_leave_each_other_their_pauses(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=2 * FILE_BYTES, wait_s=0.09)
    remote.broken = TimeoutError("too slow")
    await put(store, sample(0), sample(1))
    ends = await asyncio.gather(put(store, sample(2)), put(store, sample(3)), return_exceptions=True)
    assert [type(end) for end in ends] == [StoreWriteFailed, StoreWriteFailed]
    # each put tries both chunks, waits once until its time is over, and tries again
    assert remote.calls.count("write") < 30


async def test_while_the_remote_tier_fails_for_long_chunks_are_lost_and_counted(
    open_store: OpenStore,
    sample: Make,
    remote: FakeRemote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(copies, "SPILL_GRACE_S", 0.0)
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=FILE_BYTES, disk_policy="lru")
    remote.broken = TimeoutError("too slow")
    await put(store, *(sample(number) for number in range(4)))
    assert [store.contains(sample(number).key) for number in range(4)] == [False, False, False, True]
    assert store.stats().remote_lost == 3
    assert caplog.text.count("leave the disk without a copy") == 1


class Failures:
    """An outage whose failures come at times that are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("kvblend.store.copies.time.monotonic", lambda: self.now_s)
        self.outage = copies._Outage()

    def fail(self, *times_s: float) -> bool:
        for self.now_s in times_s:
            self.outage.note_failure()
        return self.outage.is_long()


@pytest.mark.parametrize("gap_s", [40.0, 3601.0, 86_400.0])
def test_failures_in_a_row_are_an_outage_however_far_apart(monkeypatch: pytest.MonkeyPatch, gap_s: float) -> None:
    assert Failures(monkeypatch).fail(0.0, gap_s, 2 * gap_s)


@pytest.mark.parametrize("times_s", [(0.0,), (0.0, 86_400.0), (0.0, 1.0, 2.0, 59.0)])
def test_few_failures_or_short_ones_are_none(monkeypatch: pytest.MonkeyPatch, times_s: tuple[float, ...]) -> None:
    assert not Failures(monkeypatch).fail(*times_s)


async def test_a_copy_that_succeeds_ends_an_outage(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SPILL_GRACE_S", 0.0)
    store = await open_store(tmp_path, remote=remote)
    for _ in range(copies.OUTAGE_FAILURES_MIN):
        store._copies._outage.note_failure()
    assert store._copies._outage.is_long()
    await put(store, sample(0))
    await store._copies.close(1.0)
    assert not store._copies._outage.is_long()


async def test_an_older_chunk_is_copied_before_it_leaves_the_disk(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path)
    await put(store, sample(0))
    await store.close()
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=FILE_BYTES)
    await put(store, sample(1))
    assert await read_all(store, sample(0)) == sample(0).layers


async def test_what_the_remote_tier_has_is_not_sent_again(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    keep(remote, sample(0))
    store = await open_store(tmp_path)
    await put(store, sample(0))
    await store.close()
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=FILE_BYTES)
    remote.gate("write")
    await put(store, sample(1))
    assert not store.contains(sample(0).key)
    remote.open_gate("write")


async def test_an_older_version_in_the_remote_tier_does_not_let_a_chunk_go(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    keep(remote, sample(0))
    newer = [bytearray(byte ^ 0xFF for byte in layer) for layer in sample(0).layers]
    store = await open_store(tmp_path)
    await store.put(sample(0).key, sample(0).ids, newer)
    await store.close()
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=FILE_BYTES)
    await put(store, sample(1))
    assert not sample(0).path(tmp_path).exists()
    assert await read_all(store, sample(0)) == newer


async def test_a_put_under_way_spills_while_the_store_closes(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path)
    await put(store, sample(0))
    await store.close()
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=FILE_BYTES)
    remote.gate("fetch_header")
    putting = asyncio.create_task(store.put(sample(1).key, sample(1).ids, sample(1).layers))
    await remote.arrived("fetch_header")
    closing = asyncio.create_task(store.close())
    for _ in range(3):
        await asyncio.sleep(0)
    assert store._copies.closed
    remote.open_gate("fetch_header")
    await closing
    assert await putting
    assert remote.chunks[sample(0).key.digest][1] == sample(0).layers


async def test_a_chunk_for_the_remote_tier_leaves_the_disk_first_once_it_is_there(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    for policy in ("lru", "cost"):
        store = await open_store(tmp_path / policy, remote=remote, disk_bytes_budget=3 * FILE_BYTES, disk_policy=policy)
        await put(store, sample(0))
        await store.put(sample(1).key, sample(1).ids, sample(1).layers, tier="remote", cost_s=9.0)
        await put(store, sample(2))
        await store._copies.close(1.0)
        await put(store, sample(3))
        assert [store.contains(sample(number).key) for number in range(4)] == [True, False, True, True]
        assert await read_all(store, sample(1)) == sample(1).layers


async def test_a_chunk_for_the_remote_tier_stays_in_line_while_it_is_not_there(
    open_store: OpenStore, sample: Make, remote: FakeRemote, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, remote=remote, disk_bytes_budget=2 * FILE_BYTES, disk_policy="lru")
    remote.broken = TimeoutError("too slow")
    await put(store, sample(0))
    await store.put(sample(1).key, sample(1).ids, sample(1).layers, tier="remote")
    await store._copies.close(1.0)
    remote.broken = None
    await put(store, sample(2))
    assert [store.contains(sample(number).key) for number in range(3)] == [False, True, True]
