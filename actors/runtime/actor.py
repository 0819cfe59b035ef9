"""Actors and the references through which others reach them.

An actor handles one message at a time and owns the background tasks it spawns. Whoever talks to it holds an `ActorRef`,
which stays valid when the supervisor replaces a crashed actor by a fresh one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from kvblend.actors.runtime.mailbox import Lane, Mailbox, MailboxClosed

M = TypeVar("M")
R = TypeVar("R")


class ActorDied(MailboxClosed):
    """The actor crashed or was stopped before it took or answered the message."""


class AskTimeout(Exception):
    """The actor did not answer within the asker's deadline."""


class AwaitedCancelled(Exception):
    """An actor awaited something that was cancelled, though nobody had cancelled the actor: a crash, not an end."""


class Nudge:
    """Wakes an actor that waits for a message, so that the runtime can speak to it. Never handed to `handle`."""


class Reply(Generic[R]):
    """Where an actor puts its answer to one `ask`. The first answer counts, later ones are dropped silently."""

    def __init__(self, answer: asyncio.Future[R]) -> None:
        self._answer = answer

    @property
    def open(self) -> bool:
        """Whether the asker still waits."""
        return not self._answer.done()

    def send(self, value: R) -> None:
        """Answer the asker; without effect when it waits no longer."""
        if not self._answer.done():
            self._answer.set_result(value)

    def fail(self, error: Exception) -> None:
        """Raise `error` at the asker; without effect when it waits no longer."""
        if not self._answer.done():
            self._answer.set_exception(error)


class ActorRef(Generic[M]):
    """Sends messages to one actor, whichever instance of it is alive."""

    def __init__(self, mailbox: Mailbox[M | Nudge]) -> None:
        self._mailbox = mailbox
        self._answers: set[asyncio.Future[Any]] = set()

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._mailbox.name

    @property
    def alive(self) -> bool:
        """Whether there is an instance that takes messages, or that will once it has started."""
        return not self._mailbox.closed

    def tell_nowait(self, message: M, lane: Lane = "user") -> None:
        """Send without waiting; `lane="system"` is for feedback that is bounded by construction.

        Raises:
            ActorDied: the actor is stopped, or being replaced after a crash.
            MailboxClosed: the actor is draining and takes no more user messages.
            MailboxFull: the lane is full.
        """
        try:
            self._mailbox.put_nowait(message, lane)
        except MailboxClosed as error:
            raise self._closed_or_died(error) from None

    async def tell(self, message: M, deadline_s: float | None = None) -> None:
        """Send through the user lane, waiting for room.

        Raises:
            ActorDied, MailboxClosed: as in `tell_nowait`, also when it happens during the wait.
            MailboxFull: there was no room within `deadline_s` seconds.
        """
        try:
            await self._mailbox.put(message, deadline_s)
        except MailboxClosed as error:
            raise self._closed_or_died(error) from None

    async def ask(self, build: Callable[[Reply[R]], M], deadline_s: float) -> R:
        """Send the message `build(reply)` through the user lane and wait for the answer; the deadline covers both.

        Raises:
            AskTimeout: no answer within `deadline_s` seconds.
            ActorDied: the actor died before it answered; its error is the cause. Raised at once, not at the deadline.
            MailboxClosed: the actor is draining and takes no more user messages.
            Exception: whatever the actor put into the reply with `fail`.
        """
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        try:
            async with asyncio.timeout(deadline_s) as limit:
                await self.tell(build(Reply(answer)))
                return await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise AskTimeout(f"actor {self.name} did not answer within {deadline_s} s") from error
        finally:
            self._answers.discard(answer)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen: an answer that came too late is no unhandled error
            answer.cancel()

    def fail_answers(self, cause: BaseException | None) -> None:
        """Raise `ActorDied` at everyone who waits for an answer. For the supervisor."""
        for answer in tuple(self._answers):
            if not answer.done():
                error = ActorDied(f"actor {self.name} died before it answered")
                error.__cause__ = cause
                answer.set_exception(error)

    def _closed_or_died(self, error: MailboxClosed) -> MailboxClosed:
        return error if error.intake_only else ActorDied(f"actor {self.name} is not running")


class Actor(Generic[M]):
    """Base of all actors. Made by a factory, so that a crashed one can be replaced; attached before `start`.

    `start`, `start_drain`, `handle` and `stop` never run at the same time. An exception in any of the first three, or
    in an owned task, crashes the actor: messages waiting for it are dropped and reported, and it is replaced.
    """

    _ref: ActorRef[M] | None = None
    _group: asyncio.TaskGroup | None = None
    _on_error: Callable[[BaseException], None] | None = None
    _owned: set[asyncio.Task[Any]]

    @property
    def ref(self) -> ActorRef[M]:
        """This actor's own reference, for messages to itself.

        Raises:
            RuntimeError: the actor is not attached yet.
        """
        if self._ref is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a supervisor yet")
        return self._ref

    @property
    def name(self) -> str:
        """The name it was spawned under."""
        return self.ref.name

    async def start(self) -> None:
        """Prepare; messages that arrive meanwhile wait. Does nothing by default."""

    async def handle(self, message: M) -> None:
        """Handle one message."""
        raise TypeError(f"{type(self).__name__} does not handle {type(message).__name__}")

    async def start_drain(self) -> None:
        """Learn that no more user messages will come. Must not wait for messages: they come after it returns."""

    def drained(self) -> bool:
        """Whether all accepted work is done; asked between messages while draining. True by default."""
        return True

    async def stop(self) -> None:
        """Release what the actor holds: once per instance, after its owned tasks ended, after a crash also.

        Must bear a `start` that did not finish.
        """

    def spawn(self, coroutine: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        """Run `coroutine` in a task this actor owns: cancelled and awaited before `stop`; its exception is a crash.

        Raises:
            RuntimeError: the actor is not attached, or is ending.
        """
        try:
            if self._group is None:
                raise RuntimeError(f"{type(self).__name__} owns tasks only while it runs")
            task = self._group.create_task(self._watch(coroutine), name=f"{self.name}/{name}")
        except RuntimeError:
            coroutine.close()
            raise
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)
        # A task cancelled before its first step never reaches the coroutine.
        task.add_done_callback(lambda _: coroutine.close())
        return task

    def attach(self, ref: ActorRef[M], group: asyncio.TaskGroup, on_error: Callable[[BaseException], None]) -> None:
        """Give the actor its reference and the group its tasks run in. For the supervisor.

        Raises:
            RuntimeError: the instance was attached before; a factory must make a fresh one each time.
        """
        if self._ref is not None:
            raise RuntimeError(f"the factory of {ref.name} returned the same {type(self).__name__} again")
        self._ref = ref
        self._group = group
        self._on_error = on_error
        self._owned = set()

    def cancel_owned(self) -> None:
        """Cancel all owned tasks and refuse new ones; the group awaits them. For the supervisor."""
        self._group = None
        for task in tuple(self._owned):
            task.cancel()

    async def _watch(self, coroutine: Coroutine[Any, Any, R]) -> R:
        with crash_guard(self._on_error):
            return await coroutine


@contextmanager
def crash_guard(on_error: Callable[[BaseException], None] | None) -> Iterator[None]:
    """Report what goes wrong in the block to `on_error`, then raise it on. For the supervisor.

    Raises:
        AwaitedCancelled: in place of a `CancelledError` that does not come from cancelling this task.
    """
    report = on_error or (lambda _: None)
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        stray = AwaitedCancelled("awaited something that was cancelled elsewhere")
        report(stray)
        raise stray from error
    except Exception as error:
        report(error)
        raise
