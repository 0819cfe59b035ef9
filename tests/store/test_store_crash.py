"""Killed while it writes, a store opens again with every acknowledged chunk and no damaged one."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvblend.store.store import ChunkStore

WRITER = Path(__file__).with_name("crash_writer.py")
ROUNDS = 5
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


async def write_and_kill(root: Path, first: int, acks_min: int, linger_s: float) -> list[int]:
    """Run the writer until some chunks are acknowledged, let it go on a little, kill it; all acknowledged numbers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(WRITER), str(root), str(first), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    acknowledged = [int(await process.stdout.readline()) for _ in range(acks_min)]
    await asyncio.sleep(linger_s)
    process.kill()
    acknowledged += [
        int(line) for line in (await process.stdout.read()).splitlines(keepends=True) if line[-1:] == b"\n"
    ]
    await process.wait()
    return acknowledged


async def check_all(root: Path, writer: ModuleType, numbers: dict[int, bool], caplog: pytest.LogCaptureFixture) -> None:
    """Every number that was acknowledged is there, and every chunk that is there is right."""
    store = await ChunkStore.open(root, writer.SHAPE, writer.FINGERPRINT, 1 << 20)
    served = 0
    for number, acknowledged in numbers.items():
        key, ids, layers = writer.make_chunk(number)
        lease = await store.lease(key, ids)
        assert lease is not None or not acknowledged, f"chunk {number} was acknowledged and is not there"
        if lease is not None:
            with lease:
                await lease.prefetch(range(len(layers)))
                assert [lease.layer_nowait(index) for index in range(len(layers))] == layers
            served += 1
    stats = store.stats()
    await store.close()
    assert (stats.chunks, stats.damaged, stats.foreign) == (served, 0, 0)
    assert [record.getMessage() for record in caplog.records if record.name == "kvblend.store"] == []
    assert list((root / "chunks").rglob("*.tmp")) == []


@pytest.mark.timeout(1800)
async def test_killed_writers_lose_nothing_acknowledged(
    tmp_path: Path, writer: ModuleType, stress_factor: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = random.Random(7)
    numbers: dict[int, bool] = {}
    for turn in range(ROUNDS * stress_factor):
        first = turn * NUMBERS_PER_ROUND
        acknowledged = await write_and_kill(tmp_path, first, source.randrange(1, 12), source.random() * 0.03)
        # what each writer was at when it was killed may be there as well
        at_work = {number + writer.WRITERS for number in acknowledged} | {first + n for n in range(writer.WRITERS)}
        numbers |= dict.fromkeys(at_work, False) | dict.fromkeys(acknowledged, True)
        if turn < ROUNDS:  # a full check grows with each turn
            await check_all(tmp_path, writer, numbers, caplog)
    await check_all(tmp_path, writer, numbers, caplog)
