"""The loader on a disk that hangs, fails or lies: leases are given back, nobody hears of what was given up."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from core_driver import A, B, generate, key_of
from shell_rig import SHAPE, GatedDisk, Rig, open_rig, payloads, put, put_prompt

from kvblend.actors.core import events as ev
from kvblend.actors.loader import Loader
from kvblend.actors.signals import LayerLoaded
from kvblend.actors.tables import SideTables
from kvblend.store.store import ChunkStore


@dataclass
class World:
    rig: Rig
    store: ChunkStore
    disk: GatedDisk
    tables: SideTables

    async def look_up(self, job: ev.Job) -> tuple[int, ...]:
        self.rig.tell(ev.Lookup(job))
        answer = await self.rig.heard()
        assert isinstance(answer, ev.LookedUp)
        return tuple(hit.segment for hit in answer.hits)

    @property
    def leases(self) -> int:
        return self.store.stats().leases

    async def until_no_lease(self) -> None:
        await self.rig.until(lambda: self.leases == 0)


@asynccontextmanager
async def world(root: Path, window: int = 2, ahead_bytes_max: int = 1 << 20) -> AsyncIterator[World]:
    disk = GatedDisk()
    async with open_rig() as rig, await ChunkStore.open(root, SHAPE, "m", 1 << 20, disk) as store:
        tables = SideTables()
        await put_prompt(store)
        rig.run(lambda: Loader(store, tables, rig.scheduler, rig.peer, window, ahead_bytes_max))
        w = World(rig, store, disk, tables)
        await w.look_up(generate("started", mode="full"))
        rig.tell(ev.Release("started"))
        try:
            yield w
        finally:
            disk.reads.set()
            disk.writes.set()


def flip_bits(root: Path) -> None:
    """Damage the file of chunk A."""
    (path,) = root.rglob(f"{key_of(A).id}.kvc")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :: 16] = bytes(byte ^ 1 for byte in data[len(data) // 2 :: 16])
    path.write_bytes(data)


async def test_layers_from_disk_come_in_order(tmp_path: Path) -> None:
    async with world(tmp_path, window=3) as w:
        assert await w.look_up(generate("r", A, B)) == (0, 1)
        w.rig.tell(ev.StartLoading("r", (0, 1)))
        for layer in range(3):
            assert await w.rig.passed() == LayerLoaded("r", layer)
            parts = w.tables.layers["r"].take(layer)
            assert parts is not None
            assert [(start, view[0]) for start, view in parts] == [(0, 1 + layer), (3, 1 + layer)]
        w.rig.tell(ev.Release("r"))
        await w.until_no_lease()


async def test_loading_after_a_release_reads_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.look_up(generate("r", A))
        w.rig.tell(ev.Release("r"), ev.StartLoading("r", (0, 1)))
        await w.until_no_lease()
        assert await w.look_up(generate("next", A)) == (0, 1)
        assert w.disk.read_count == 0


@pytest.mark.parametrize("turns", range(6))
async def test_a_release_at_any_moment_of_a_read_that_begins_harms_nobody(tmp_path: Path, turns: int) -> None:
    async with world(tmp_path) as w:
        await w.look_up(generate("r", A, B))
        w.rig.tell(ev.StartLoading("r", (0, 1)))
        for _ in range(turns):
            await asyncio.sleep(0)
        w.rig.tell(ev.Release("r"))
        await w.until_no_lease()
        assert await w.look_up(generate("next", A)) == (0, 1)


async def test_a_release_gives_the_lease_back_at_once_though_a_read_hangs_and_nobody_is_told_of_it(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await w.look_up(generate("r", A))
        w.disk.reads.clear()
        w.rig.tell(ev.StartLoading("r", (1,)))
        await w.disk.reading.acquire()
        w.rig.tell(ev.Release("r"))
        await w.until_no_lease()
        w.disk.reads.set()
        await w.rig.until(lambda: w.store.stats().layers_read > 0)
        assert w.rig.passed_on.depth == 0


async def test_reads_that_hang_for_a_cancelled_request_do_not_keep_others_waiting(tmp_path: Path) -> None:
    async with world(tmp_path, window=1) as w:
        await put(w.store, B)
        await w.look_up(generate("gone", A))
        w.disk.reads.clear()
        w.rig.tell(ev.StartLoading("gone", (1,)))
        await w.disk.reading.acquire()
        w.rig.tell(ev.Release("gone"))
        await w.look_up(generate("next", B))
        w.rig.tell(ev.StartLoading("next", (1,)))
        await w.disk.reading.acquire()
        assert w.disk.read_count == 2


async def test_queued_reads_of_a_cancelled_request_never_start(tmp_path: Path) -> None:
    async with world(tmp_path, window=1) as w:
        await w.look_up(generate("r", A))
        w.disk.reads.clear()
        w.rig.tell(ev.StartLoading("r", (0, 1)))
        await w.disk.reading.acquire()
        w.rig.tell(ev.Release("r"))
        await w.until_no_lease()
        w.disk.reads.set()
        await w.rig.until(lambda: w.store.stats().layers_read > 0)
        assert w.disk.read_count == 1


async def test_a_request_in_the_queue_has_its_first_layers_read_and_its_look_up_keeps_the_leases(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        job = generate("r", A)
        w.rig.tell(ev.LookAhead(job))
        await w.rig.until(lambda: w.store.stats().layers_read == 4)
        leased = w.leases
        assert await w.look_up(job) == (0, 1)
        assert (leased, w.leases) == (2, 2)
        w.rig.tell(ev.StartLoading("r", (0, 1)))
        assert [(await w.rig.passed()).layer for _ in range(3)] == [0, 1, 2]
        assert w.store.stats().layers_read == 6


async def test_a_request_that_leaves_the_queue_gives_back_what_was_leased_ahead(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.rig.tell(ev.LookAhead(generate("r", A)))
        await w.rig.until(lambda: w.leases == 2)
        w.rig.tell(ev.Release("r"))
        await w.until_no_lease()


async def test_no_more_is_leased_ahead_than_the_budget(tmp_path: Path) -> None:
    async with world(tmp_path, ahead_bytes_max=3 * SHAPE.layer_bytes(len(A))) as w:
        w.rig.tell(ev.LookAhead(generate("r", A)))
        await w.rig.until(lambda: w.leases == 1 and w.store.stats().layers_read == 2)
        w.rig.tell(ev.LookAhead(generate("s", A)), ev.Release("r"))
        await w.rig.until(lambda: w.leases == 1)


async def test_damage_found_while_looking_ahead_is_a_miss_of_the_look_up(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        flip_bits(tmp_path)
        job = generate("r", A)
        w.rig.tell(ev.LookAhead(job))
        await w.rig.until(lambda: not w.store.contains(key_of(A)))
        assert await w.look_up(job) == (0,)


async def test_hits_say_how_many_bytes_are_to_be_read(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.rig.tell(ev.Lookup(generate("r", A)))
        found = await w.rig.heard()
        assert [hit.num_bytes for hit in found.hits] == [3 * SHAPE.layer_bytes(n) for n in (3, len(A))]


async def test_a_request_that_comes_again_while_its_first_read_hangs_is_served(tmp_path: Path) -> None:
    async with world(tmp_path, window=1) as w:
        await w.look_up(generate("r", A))
        w.disk.reads.clear()
        w.rig.tell(ev.StartLoading("r", (1,)))
        await w.disk.reading.acquire()
        w.rig.tell(ev.Release("r"))
        await w.look_up(generate("r", A))
        w.rig.tell(ev.StartLoading("r", (0, 1)))
        w.disk.reads.set()
        assert [(await w.rig.passed()).layer for _ in range(3)] == [0, 1, 2]
        w.rig.tell(ev.Release("r"))
        await w.until_no_lease()


async def test_no_more_layers_are_read_ahead_than_the_window(tmp_path: Path) -> None:
    async with world(tmp_path, window=1) as w:
        await w.look_up(generate("r", A))
        w.disk.reads.clear()
        w.rig.tell(ev.StartLoading("r", (1,)))
        await w.disk.reading.acquire()
        for _ in range(50):
            await asyncio.sleep(0)
        assert w.disk.read_count == 1


async def test_requests_that_share_a_chunk_share_its_reads_and_its_memory(tmp_path: Path) -> None:
    async with world(tmp_path, window=3) as w:
        w.disk.reads.clear()
        for name in ("a", "b"):
            await w.look_up(generate(name, A))
            w.rig.tell(ev.StartLoading(name, (1,)))
        for _ in range(3):
            await w.disk.reading.acquire()
        w.disk.reads.set()
        told = [await w.rig.passed() for _ in range(6)]
        assert {(layer.request_id, layer.layer) for layer in told} == {(n, k) for n in "ab" for k in range(3)}
        assert w.disk.read_count == 3
        first, second = (w.tables.layers[name].take(0) for name in ("a", "b"))
        assert first is not None
        assert second is not None
        one, other = first[0][1], second[0][1]
        assert isinstance(one, memoryview)
        assert isinstance(other, memoryview)
        assert one.obj is other.obj


async def test_flipped_bits_are_told_once_and_the_chunk_is_forgotten(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        flip_bits(tmp_path)
        await w.look_up(generate("r", A))
        w.rig.tell(ev.StartLoading("r", (0, 1)))
        failed = await w.rig.heard()
        assert isinstance(failed, ev.LoadFailed)
        assert failed.request_id == "r"
        w.rig.tell(ev.Release("r"))
        await w.until_no_lease()
        assert w.rig.mail.depth == 0
        assert not w.store.contains(key_of(A))


async def test_a_full_disk_is_told_with_its_reason(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.disk.error = OSError(errno.ENOSPC, "No space left on device")
        w.tables.captured["r", 1] = payloads(len(B))
        w.rig.tell(ev.StoreSegment("r", 1, key_of(B), B))
        told = await w.rig.heard()
        assert not told.created
        assert told.error.startswith("not stored: ")
        assert "No space left on device" in told.error


async def test_a_crash_gives_everything_back_while_requests_load(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.look_up(generate("a", A))
        await w.look_up(generate("b", A))
        w.disk.reads.clear()
        w.rig.tell(ev.StartLoading("b", (0, 1)))
        await w.disk.reading.acquire()
        w.rig.tell("nonsense")
        assert isinstance(await w.rig.crashes.get(), TypeError)
        await w.until_no_lease()
        w.disk.reads.set()
        assert await w.look_up(generate("next", A)) == (0, 1)
        w.rig.tell(ev.Release("next"))
        await w.until_no_lease()


async def test_a_write_under_way_is_finished_though_the_loader_crashes(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.disk.writes.clear()
        w.tables.captured["r", 1] = payloads(len(B))
        w.rig.tell(ev.StoreSegment("r", 1, key_of(B), B))
        await w.rig.until(lambda: not w.tables.captured)
        w.rig.tell("nonsense")
        await w.rig.crashes.get()
        w.disk.writes.set()
        await w.rig.until(lambda: w.store.contains(key_of(B)))


async def test_a_scheduler_and_a_blender_that_are_not_there_harm_nobody(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.rig.mail.close()
        w.rig.passed_on.close()
        w.rig.tell(ev.Lookup(generate("r", A)))
        await w.rig.until(lambda: w.leases == 2)
        w.rig.tell(ev.StartLoading("r", (0, 1)), ev.Release("r"))
        await w.until_no_lease()
        assert w.rig.crashes.empty()
