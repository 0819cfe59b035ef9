"""A disk of any speed: a `DiskIO` whose reads share a given throughput and wait a given time for their first byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvblend.store.files import DiskIO, FileHead
from kvblend.store.format import Buffer

P = ParamSpec("P")
T = TypeVar("T")


class SharedRate:
    """Bytes per second shared evenly by all transfers that run at the same time; times are the loop's.

    Exact however late its timer fires: what a moment costs is counted afterwards, so no throughput is lost to rounding.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._left: dict[asyncio.Future[None], float] = {}
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def transfer(self, num_bytes: int) -> None:
        """Return when this many bytes have had their turn."""
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left[done] = float(num_bytes)
        self._arm()
        try:
            await done
        finally:
            if self._left.pop(done, None) is not None:
                self._arm()

    def _advance(self) -> None:
        """Bring all transfers up to now, one finished transfer after another."""
        now = asyncio.get_running_loop().time()
        while self._left:
            smallest = min(self._left.values())
            ends = self._at_s + smallest * len(self._left) / self.bytes_per_s
            step = smallest if ends <= now else (now - self._at_s) * self.bytes_per_s / len(self._left)
            for future in list(self._left):
                self._left[future] -= step
                if ends <= now and self._left[future] <= 1e-6:
                    del self._left[future]
                    if not future.done():
                        future.set_result(None)
            if ends > now:
                break
            self._at_s = ends
        self._at_s = now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._left:
            seconds = min(self._left.values()) * len(self._left) / self.bytes_per_s
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        self._arm()


class ThrottledIO:
    """`inner` with slow reads; writes and everything else are as fast as they are. Both figures may change any time.

    `bytes_per_s` 0 is no limit.
    """

    def __init__(self, inner: DiskIO, bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        self._inner = inner
        self._rate = SharedRate(bytes_per_s)
        self.latency_s = latency_s

    @property
    def bytes_per_s(self) -> float:
        """The throughput that all reads share."""
        return self._rate.bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, value: float) -> None:
        self._rate = SharedRate(value)

    async def _wait(self, num_bytes: int) -> None:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if self._rate.bytes_per_s and num_bytes:
            await self._rate.transfer(num_bytes)

    async def list_folder(self, path: Path) -> list[str]:
        return await self._inner.list_folder(path)

    async def list_folders(self, paths: Sequence[Path]) -> list[list[str] | OSError]:
        return await self._inner.list_folders(paths)

    async def read_heads(self, paths: Sequence[Path]) -> list[FileHead | OSError]:
        heads = await self._inner.read_heads(paths)
        await self._wait(sum(len(head.first) for head in heads if isinstance(head, FileHead)))
        return heads

    async def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        got = await self._inner.read_into(path, offset, view)
        await self._wait(got)
        return got

    async def write_file(self, path: Path, parts: Sequence[Buffer]) -> int:
        return await self._inner.write_file(path, parts)

    async def rename(self, source: Path, target: Path) -> None:
        await self._inner.rename(source, target)

    async def remove(self, path: Path) -> None:
        await self._inner.remove(path)

    async def make_folder(self, path: Path) -> None:
        await self._inner.make_folder(path)

    async def sync_folder(self, path: Path) -> None:
        await self._inner.sync_folder(path)

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._inner.compute(function, *args, **kwargs)

    async def close(self) -> None:
        await self._inner.close()
