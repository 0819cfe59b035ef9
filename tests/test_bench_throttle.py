"""The throttled disk of the benchmarks: its throughput is shared evenly and not lost, its latency is paid per read."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kvblend.store.files import AiofilesIO

PATH = Path(__file__).resolve().parent.parent / "bench" / "throttle.py"


def load_throttle() -> Any:
    spec = importlib.util.spec_from_file_location("bench_throttle", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


throttle = load_throttle()


async def seconds(*transfers: Any) -> list[float]:
    """When each was done, counted from now."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def timed(transfer: Any) -> float:
        await transfer
        return loop.time() - began

    return await asyncio.gather(*map(timed, transfers))


async def test_transfers_share_the_throughput_evenly_and_smaller_ones_are_done_first() -> None:
    rate = throttle.SharedRate(1e6)
    small, large = await seconds(rate.transfer(20_000), rate.transfer(60_000))
    # until 40 ms both have half of it, then the larger one has all
    assert small >= 0.039
    assert large >= 0.079
    assert small < large


async def test_no_throughput_is_lost_over_many_small_transfers() -> None:
    rate = throttle.SharedRate(1e6)

    async def stream() -> None:
        for _ in range(100):
            await rate.transfer(500)

    (took, *_) = await seconds(asyncio.gather(*[stream() for _ in range(4)]))
    assert took >= 0.199


async def test_a_cancelled_transfer_leaves_its_share_to_the_others() -> None:
    rate = throttle.SharedRate(1e6)
    gone = asyncio.create_task(rate.transfer(10_000_000))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    (took,) = await seconds(rate.transfer(20_000))
    assert took < 5.0


async def test_reads_are_slow_and_right_and_writes_are_not_slowed(tmp_path: Path) -> None:
    disk = throttle.ThrottledIO(AiofilesIO(), 1e6, 0.02)
    path, data = tmp_path / "file", bytes(range(256)) * 100
    (written,) = await seconds(disk.write_file(path, [data]))
    view = memoryview(bytearray(len(data)))
    (read,) = await seconds(disk.read_into(path, 0, view))
    assert bytes(view) == data
    assert read >= 0.02 + len(data) / 1e6 - 0.002
    assert written < 5.0
    disk.bytes_per_s, disk.latency_s = 0.0, 0.0
    assert await disk.read_into(path, 0, view) == len(data)
    await disk.close()
