"""Runs the actors, each in one task: restarts the crashed, drains, stops, and ends everything past the limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvblend.actors.runtime.actor import Actor, ActorRef, Nudge, crash_guard
from kvblend.actors.runtime.cell import ActorCell, ActorStatistics
from kvblend.actors.runtime.mailbox import Mailbox

M = TypeVar("M")
CrashHook = Callable[[str, BaseException, tuple[Any, ...]], None]
log = logging.getLogger(__name__)


class RestartLimitExceeded(Exception):
    """An actor crashed once more than it may; the last crash is the cause."""


class Supervisor:
    """Owns every actor's task. Make it within a running loop, and `await close()` it.

    `on_crash(name, error, dropped)` runs at once when an actor crashes, before it is replaced: `dropped` are the
    messages it will never handle, the interrupted one first. It must not wait; if it raises, that is fatal.
    Messages dropped by `close` are counted, not reported. `clock` counts seconds; `stop_s_max` bounds `Actor.stop`.
    """

    def __init__(
        self,
        on_crash: CrashHook | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        restarts_max: int = 3,
        restart_window_s: float = 60.0,
        stop_s_max: float = 5.0,
    ) -> None:
        self._on_crash = on_crash
        self._clock = clock
        self._restarts_max = restarts_max
        self._restart_window_s = restart_window_s
        self._stop_s_max = stop_s_max
        self._cells: dict[str, ActorCell] = {}
        self._closing = False
        self._fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def fatal(self) -> asyncio.Future[BaseException]:
        """Resolves with the error that ended everything; never, while the actors can be kept alive."""
        return self._fatal

    def spawn(
        self, factory: Callable[[], Actor[M]], capacity: int, name: str, system_capacity: int = 1024
    ) -> ActorRef[M]:
        """Start an actor made by `factory`, whose user lane holds `capacity` messages; they wait until it has started.

        `system_capacity` bounds the feedback that its senders never wait with.

        Raises:
            ValueError: the name is taken, or a capacity is below 1.
            RuntimeError: the supervisor is closing.
        """
        if name in self._cells:
            raise ValueError(f"there is an actor named {name!r} already")
        if self._closing:
            raise RuntimeError(f"actor {name!r} cannot start: the supervisor is closing")
        mailbox: Mailbox[M | Nudge] = Mailbox(name, capacity, system_capacity)
        cell = ActorCell(factory, mailbox, self._clock)
        self._cells[name] = cell
        cell.task = asyncio.get_running_loop().create_task(self._keep_alive(cell), name=f"actor/{name}")
        # Not a `finally` in the task: cancelled before its first step, it would never get there.
        cell.task.add_done_callback(lambda task: self._finish(cell, task))
        return cell.ref

    async def drain(self, order: Sequence[str], deadline_s: float) -> tuple[str, ...]:
        """Close the user lanes actor by actor, waiting until each has handled what it holds and is `drained()`.

        Drained actors stay alive for feedback, until `close`. Returns the names that were not done in time, () if all
        were; past the deadline the remaining lanes are closed all the same.

        Raises:
            ValueError: an unknown name, before anything is closed.
        """
        unknown = [name for name in order if name not in self._cells]
        if unknown:
            raise ValueError(f"no actor named {', '.join(unknown)}; there are {', '.join(self._cells)}")
        end = asyncio.get_running_loop().time() + deadline_s
        late: list[str] = []
        for cell in (self._cells[name] for name in order):
            cell.draining = True
            cell.mailbox.close_intake()
            cell.signal()
            try:
                async with asyncio.timeout_at(end):
                    await cell.quiet.wait()
            except TimeoutError:
                late.append(cell.name)
        return tuple(late)

    async def close(self, deadline_s: float = 5.0) -> None:
        """Stop all actors, last spawned first; each finishes the message it is at.

        Past the deadline they are cancelled. Idempotent. Waiting messages are dropped, waiting askers get `ActorDied`.

        Raises:
            RuntimeError: called from within an actor, or a task ignores its cancellation.
        """
        if asyncio.current_task() in {cell.task for cell in self._cells.values()}:
            raise RuntimeError("an actor cannot close its supervisor")
        self._closing = True
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        for cell in reversed(self._cells.values()):
            cell.stopping = True
            cell.signal()
            if cell.task is not None:
                await asyncio.wait([cell.task], timeout=max(0.0, end - loop.time()))
        stuck = {cell.task for cell in self._cells.values() if cell.task is not None and not cell.task.done()}
        if not stuck:
            return
        for cell in self._cells.values():
            cell.cancel()
        _, stuck = await asyncio.wait(stuck, timeout=self._stop_s_max + 1.0)
        if stuck:
            raise RuntimeError(f"did not stop when cancelled: {', '.join(sorted(task.get_name() for task in stuck))}")

    def statistics(self) -> dict[str, ActorStatistics]:
        """Statistics by actor name."""
        return {name: cell.statistics() for name, cell in self._cells.items()}

    async def _keep_alive(self, cell: ActorCell) -> None:
        while True:
            await self._live(cell)
            if cell.error is None or not self._may_restart(cell):
                return
            cell.error = None
            cell.mailbox.reopen()
            if cell.draining:
                cell.mailbox.close_intake()

    def _finish(self, cell: ActorCell, task: asyncio.Task[None]) -> None:
        cell.finish()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    async def _live(self, cell: ActorCell) -> None:
        """Run one instance from its making to its end; a crash is left in `cell.error`."""

        def collapse(error: BaseException) -> None:
            self._collapse(cell, error)

        actor: Actor[Any] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                with crash_guard(collapse):
                    actor = cell.factory()
                    actor.attach(cell.ref, group, collapse)
                    await actor.start()
                    await cell.work(actor)
                actor.cancel_owned()
        except ExceptionGroup:
            pass  # `collapse` has taken the first error and logged it
        finally:
            if actor is not None:
                await self._stop(cell, actor)

    async def _stop(self, cell: ActorCell, actor: Actor[Any]) -> None:
        actor.cancel_owned()
        cell.ending = True
        try:
            with crash_guard(None):
                async with asyncio.timeout(self._stop_s_max):
                    await actor.stop()
        except Exception as error:
            self._collapse(cell, error)
        finally:
            cell.ending = False

    def _collapse(self, cell: ActorCell, error: BaseException) -> None:
        """Take note of a crash at once, whoever waits for the actor being told before anything else happens."""
        if cell.error is not None:
            log.error("actor %s failed again while ending", cell.name, exc_info=error)
            return
        cell.error = cell.last_error = error
        log.error("actor %s crashed", cell.name, exc_info=error)
        dropped = cell.empty()
        cell.ref.fail_answers(error)
        if self._on_crash is None:
            return
        try:
            self._on_crash(cell.name, error, dropped)
        except Exception as hook_error:
            log.exception("the crash hook failed for actor %s", cell.name)
            self._end(hook_error)

    def _may_restart(self, cell: ActorCell) -> bool:
        if self._closing:
            return False
        now = self._clock()
        while cell.restarts and now - cell.restarts[0] >= self._restart_window_s:
            cell.restarts.popleft()
        if len(cell.restarts) >= self._restarts_max:
            text = f"actor {cell.name} crashed after {self._restarts_max} restarts in {self._restart_window_s:g} s"
            limit = RestartLimitExceeded(text)
            limit.__cause__ = cell.error
            self._end(limit)
            return False
        cell.restarts.append(now)
        cell.restarts_total += 1
        return True

    def _end(self, error: BaseException) -> None:
        """End everything at once: a system with a dead part must not look alive."""
        self._closing = True
        if not self._fatal.done():
            log.critical("ending all actors: %s", error)
            self._fatal.set_result(error)
        for cell in self._cells.values():
            cell.stopping = True
            if cell.task is not asyncio.current_task():
                cell.cancel()
