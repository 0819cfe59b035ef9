"""Tasks and threads that belong to the store, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """Running tasks, held until they are done; their waiters may be cancelled without harm to them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start `work`. An exception it ends with is kept for who waits, and is no complaint if nobody does."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._settle)
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Start `work` and wait for its result; a cancelled caller leaves it running."""
        return await asyncio.shield(self.start(work, name))

    async def drain(self) -> None:
        """Wait until no task is left, those started meanwhile included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


async def end_threads(executor: ThreadPoolExecutor) -> None:
    """End an executor's threads once their jobs are done, without making the event loop wait for them."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        executor.shutdown(wait=True)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=end, name="kvblend-store-close").start()
    await ended.wait()
