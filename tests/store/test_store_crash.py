"""Killed at any moment, a store opens again with every acknowledged chunk, no deleted one and no damaged one."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from kvblend.store.maintenance import check, forget_catalog

WRITER = Path(__file__).with_name("crash_writer.py")
ROUNDS = 5
CHECK_EVERY = 25
NUMBERS_PER_ROUND = 10_000


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """The writer's module, to know what each number stands for."""
    spec = importlib.util.spec_from_file_location("crash_writer", WRITER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ledger:
    """What the killed writers said: chunks that must be there, must not, or may (their fate was not told)."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.gone: set[int] = set()
        self.open: set[int] = set()

    def enter(self, first: int, writers: int, lines: Iterable[bytes]) -> None:
        """Take in one writer's whole lines, in order."""
        self.open |= set(range(first, first + writers))
        for line in lines:
            word, number = line.decode().split()
            chunk = int(number)
            for group in (self.there, self.gone, self.open):
                group.discard(chunk)
            {"put": self.there, "going": self.open, "gone": self.gone}[word].add(chunk)
            if word == "put":
                self.open.add(chunk + writers)


async def write_and_kill(root: Path, first: int, budget: int, lines_min: int, linger_s: float) -> list[bytes]:
    """Run the writer until it has said so much, let it go on a little, kill it; all whole lines it said."""
    arguments = (str(WRITER), str(root), str(first), str(budget))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(lines_min)]
    await asyncio.sleep(linger_s)
    process.kill()
    lines += (await process.stdout.read()).splitlines(keepends=True)
    await process.wait()
    return [line for line in lines if line.endswith(b"\n")]


async def check_all(root: Path, writer: ModuleType, ledger: Ledger, budget: int = 0) -> None:
    """What was acknowledged is there, what is there is right, and the index agrees with the files."""
    if budget:
        # what the killed writer had beyond its budget goes in the background
        await (await writer.open_store(root, budget)).close()
    store = await writer.open_store(root, budget)
    served = 0
    for number in sorted(ledger.there | ledger.gone | ledger.open):
        key, ids, layers = writer.make_chunk(number)
        lease = await store.lease(key, ids)
        if number in ledger.there and not budget:
            assert lease is not None, f"chunk {number} was acknowledged and is not there"
        if number in ledger.gone:
            assert lease is None, f"chunk {number} was deleted and is there"
        if lease is not None:
            with lease:
                await lease.prefetch(range(len(layers)))
                assert [lease.layer_nowait(index) for index in range(len(layers))] == layers
            served += 1
    stats = store.stats()
    await store.close()
    assert (stats.chunks, stats.damaged, stats.foreign) == (served, 0, 0)
    found = await asyncio.to_thread(check, root)
    assert (len(found.chunks), found.file_bytes, found.odd) == (served, stats.disk_bytes, [])
    if budget:
        assert found.file_bytes <= budget


async def crash(root: Path, writer: ModuleType, rounds: int, budget: int, caplog: pytest.LogCaptureFixture) -> None:
    source = random.Random(budget or 7)
    ledger = Ledger()
    for turn in range(rounds):
        first = turn * NUMBERS_PER_ROUND
        # some are killed before they have said anything: while they open the store
        lines = await write_and_kill(root, first, budget, source.choice((0, 1, 3, 8, 15)), source.random() * 0.05)
        ledger.enter(first, writer.WRITERS, lines)
        if turn < ROUNDS or turn % CHECK_EVERY == 0:  # a full check grows with each turn
            await check_all(root, writer, ledger, budget)
    await check_all(root, writer, ledger, budget)
    assert [record.getMessage() for record in caplog.records if record.name == "kvblend.store"] == []
    # a chunk is what its file says: an index built anew serves the same ones
    await asyncio.to_thread(forget_catalog, root)
    await check_all(root, writer, ledger, budget)


@pytest.mark.timeout(3600)
async def test_killed_writers_lose_nothing_acknowledged(
    tmp_path: Path, writer: ModuleType, stress_factor: int, caplog: pytest.LogCaptureFixture
) -> None:
    await crash(tmp_path, writer, ROUNDS * stress_factor, 0, caplog)


@pytest.mark.timeout(3600)
async def test_killed_writers_that_evict_leave_a_sound_store_within_its_budget(
    tmp_path: Path, writer: ModuleType, stress_factor: int, caplog: pytest.LogCaptureFixture
) -> None:
    await crash(tmp_path, writer, 3 * stress_factor, 3 << 20, caplog)
