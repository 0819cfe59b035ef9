"""A disk of any speed: a `DiskIO` whose reads share a given throughput and wait a given time for their first byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvblend.store.files import DiskIO, FileHead, FileRead
from kvblend.store.format import Buffer

P = ParamSpec("P")
T = TypeVar("T")
CATCH_UP_S = 0.005


class Pace:
    """Bytes per second that all reads share, one after another as a disk serves them; it holds up who reads.

    A timer of the event loop for every read would take its processor time from what is measured, which no disk does.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Return when this many bytes have had their turn."""
        with self._lock:
            now = time.monotonic()
            # what a thread overslept, or took to come back with its next read, is not lost
            self._free_s = max(self._free_s, now - CATCH_UP_S) + num_bytes / self.bytes_per_s
            left = self._free_s - now
        if left > 0.0:
            time.sleep(left)


class ThrottledIO:
    """`inner` with slow reads; writes and everything else are as fast as they are. Both figures may change any time.

    `bytes_per_s` 0 is no limit. Reads wait in the threads of `inner`, as they do for a disk that is slow.
    """

    def __init__(self, inner: DiskIO, bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        self._inner = inner
        self._pace = Pace(bytes_per_s)
        self.latency_s = latency_s

    @property
    def bytes_per_s(self) -> float:
        """The throughput that all reads share."""
        return self._pace.bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, value: float) -> None:
        self._pace = Pace(value)

    def _wait(self, num_bytes: int) -> None:
        if self.latency_s:
            time.sleep(self.latency_s)
        if self._pace.bytes_per_s and num_bytes:
            self._pace.wait(num_bytes)

    async def list_folder(self, path: Path) -> list[str]:
        return await self._inner.list_folder(path)

    async def list_folders(self, paths: Sequence[Path]) -> list[list[str] | OSError]:
        return await self._inner.list_folders(paths)

    async def read_heads(self, paths: Sequence[Path]) -> list[FileHead | OSError]:
        heads = await self._inner.read_heads(paths)
        await self.compute(self._wait, sum(len(head.first) for head in heads if isinstance(head, FileHead)))
        return heads

    async def read_into(self, reads: Sequence[FileRead]) -> list[int | Exception]:
        def arrived(read: FileRead) -> None:
            self._wait(len(read.view))
            if read.then is not None:
                read.then()

        return await self._inner.read_into([read._replace(then=partial(arrived, read)) for read in reads])

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
