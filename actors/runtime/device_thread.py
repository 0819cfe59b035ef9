"""One thread that runs everything on the device, in the order of submission: nothing computes anywhere else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class DeviceBusy(Exception):
    """As many callables wait or run as may."""


class DeviceClosed(Exception):
    """The device thread is not running, or was closed before it came to the callable."""


class DeviceThread:
    """Runs callables one after the other in a thread of its own; `capacity` bounds those that wait or run.

    Its methods belong to the loop `start` was awaited in. A thread is used once: start, submit, close.

    Raises:
        ValueError: a capacity below 1.
    """

    def __init__(self, name: str = "kvblend-device", capacity: int = 64) -> None:
        if capacity < 1:
            raise ValueError(f"device thread {name}: capacity is {capacity}; it must be at least 1")
        self.name = name
        self.capacity = capacity
        self._jobs: dict[Future[Any], asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None
        self._last: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def depth(self) -> int:
        """How many callables wait or run."""
        return len(self._jobs)

    @property
    def thread_id(self) -> int | None:
        """The identifier of the thread while it runs, else None."""
        return None if self._thread is None else self._thread.ident

    async def start(self, initialiser: Callable[[], object] | None = None) -> None:
        """Start the thread and wait until `initialiser` has run in it; if it raises, the thread is closed again.

        Raises:
            RuntimeError: it was started before.
            Exception: whatever the initialiser raised.
        """
        if self._loop is not None:
            raise RuntimeError(f"device thread {self.name} was started before")
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self.name)
        try:
            self._thread = await self._post(self._pool, threading.current_thread, ())
            if initialiser is not None:
                await self.submit(initialiser)
        except BaseException:
            await self.close()
            raise

    def submit(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run `function(*args)` in the thread after all submitted before; never waits. Its outcome is the future's.

        Cancelling the future skips a callable that has not begun; of one that runs, the outcome is dropped silently.

        Raises:
            DeviceBusy: `capacity` callables wait or run.
            DeviceClosed: the thread is not running.
        """
        if self._pool is None or self._closed:
            raise DeviceClosed(f"device thread {self.name} is not running")
        if len(self._jobs) >= self.capacity:
            raise DeviceBusy(f"device thread {self.name}: {self.capacity} callables wait or run")
        return self._post(self._pool, function, args)

    async def close(self) -> None:
        """Let the running callable finish, fail those that wait with `DeviceClosed`, and end the thread. Idempotent."""
        pool = self._pool
        if pool is None:
            self._closed = True
            return
        if not self._closed:
            self._closed = True
            for job in tuple(self._jobs):
                job.cancel()
            self._last = self._post(pool, _nothing, ())
            pool.shutdown(wait=False)
        if self._last is not None:
            await asyncio.shield(self._last)
        # The thread has nothing left to do and ends within microseconds, but a join would still block the loop.
        while self._thread is not None and self._thread.is_alive():  # noqa: ASYNC110  (its end sets no event)
            await asyncio.sleep(0.001)
        self._thread = None

    def _post(self, pool: ThreadPoolExecutor, function: Callable[..., T], args: tuple[Any, ...]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise RuntimeError(f"device thread {self.name} belongs to another event loop")
        outcome: asyncio.Future[T] = loop.create_future()
        job = pool.submit(_call, outcome, function, args)
        self._jobs[job] = outcome
        outcome.add_done_callback(lambda done: job.cancel() if done.cancelled() else None)
        job.add_done_callback(self._report)
        return outcome

    def _report(self, job: Future[Any]) -> None:
        # Runs in the device thread, or in the loop's for a job that is cancelled before it began.
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._settle, job)
        except RuntimeError:
            return  # the loop was closed without us: nobody is left to tell

    def _settle(self, job: Future[Any]) -> None:
        outcome = self._jobs.pop(job)
        if outcome.done():
            return
        if job.cancelled():
            outcome.set_exception(DeviceClosed(f"device thread {self.name} was closed"))
            return
        error = job.exception()
        if error is None:
            outcome.set_result(job.result())
        else:
            outcome.set_exception(error)


def _call(outcome: asyncio.Future[T], function: Callable[..., T], args: tuple[Any, ...]) -> T | None:
    # The loop may not have come to withdraw the job yet.
    if outcome.cancelled():
        return None
    try:
        return function(*args)
    except StopIteration as error:
        # No future can carry it.
        raise RuntimeError("the callable raised StopIteration") from error


def _nothing() -> None:
    return None
