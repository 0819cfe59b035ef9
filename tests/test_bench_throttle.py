"""The throttled disk of the benchmarks: all reads share its throughput, its latency is paid per read."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

from kvblend.store.files import AiofilesIO, FileRead

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


async def test_transfers_have_the_throughput_one_after_another() -> None:
    pace = throttle.Pace(1e6)
    both = await seconds(asyncio.to_thread(pace.wait, 20_000), asyncio.to_thread(pace.wait, 60_000))
    assert max(both) >= 0.079 - throttle.CATCH_UP_S


async def test_no_throughput_is_gained_over_many_small_transfers() -> None:
    pace = throttle.Pace(1e6)

    def stream() -> None:
        for _ in range(100):
            pace.wait(500)

    (took, *_) = await seconds(asyncio.gather(*[asyncio.to_thread(stream) for _ in range(4)]))
    assert took >= 0.199 - throttle.CATCH_UP_S


async def test_reads_are_slow_and_right_and_writes_are_not_slowed(tmp_path: Path) -> None:
    disk = throttle.ThrottledIO(AiofilesIO(), 1e6, 0.02)
    path, data = tmp_path / "file", bytes(range(256)) * 100
    (written,) = await seconds(disk.write_file(path, [data]))
    view = memoryview(bytearray(len(data)))
    (read,) = await seconds(disk.read_into([FileRead(path, 0, view)]))
    assert bytes(view) == data
    assert read >= 0.02 + len(data) / 1e6 - throttle.CATCH_UP_S - 0.002
    assert written < 5.0
    disk.bytes_per_s, disk.latency_s = 0.0, 0.0
    assert await disk.read_into([FileRead(path, 0, view)]) == [len(data)]
    await disk.close()
