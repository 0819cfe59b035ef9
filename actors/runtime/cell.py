"""The part of a supervised actor that outlives its instances, and the loop that feeds messages to one instance."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvblend.actors.runtime.actor import Actor, ActorRef, Nudge
from kvblend.actors.runtime.mailbox import Mailbox, MailboxClosed, MailboxFull, MailboxStatistics


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """One actor over all its instances. `busy_s` is time within `handle`, its awaits included.

    `dropped` counts messages that no instance handled to the end. `last_error` is the last crash as text.
    """

    name: str
    alive: bool
    mailbox: MailboxStatistics
    restarts: int
    handled: int
    dropped: int
    busy_s: float
    last_error: str | None


class ActorCell:
    """What outlives the instances of one actor: its mailbox, reference, counters and flags. For the supervisor.

    `error` is the crash of the instance that is ending, None while all is well. `quiet` is set once a draining actor
    has nothing left to do, or has ended. `ending` while an instance's `stop` runs, which is not to be cut short.
    """

    def __init__(self, factory: Callable[[], Actor[Any]], mailbox: Mailbox[Any], clock: Callable[[], float]) -> None:
        self.factory = factory
        self.mailbox = mailbox
        self.clock = clock
        self.ref: ActorRef[Any] = ActorRef(mailbox)
        self.task: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self.last_error: BaseException | None = None
        self.current: list[Any] = []
        self.restarts: deque[float] = deque()
        self.restarts_total = self.handled = self.dropped = 0
        self.busy_s = 0.0
        self.draining = self.stopping = self.ending = False
        self.quiet = asyncio.Event()

    @property
    def name(self) -> str:
        """The actor's name."""
        return self.mailbox.name

    def signal(self) -> None:
        """Make the loop look at its flags; with a full system lane it is awake anyway."""
        if not self.mailbox.closed:
            try:
                self.mailbox.put_nowait(Nudge(), "system")
            except MailboxFull:
                return

    def cancel(self) -> None:
        """Cancel the actor's task, unless `stop` runs in it: that is bounded already."""
        if self.task is not None and not self.ending:
            self.task.cancel()

    def empty(self) -> tuple[Any, ...]:
        """Close the mailbox and return what will not be handled, the interrupted message first."""
        lost = tuple(m for m in (*self.current, *self.mailbox.close()) if not isinstance(m, Nudge))
        self.current.clear()
        self.dropped += len(lost)
        return lost

    async def work(self, actor: Actor[Any]) -> None:
        """Hand messages to the actor until it is told to stop."""
        drain_started = False
        while not self.stopping:
            if self.draining and not drain_started:
                drain_started = True
                await actor.start_drain()
            if self.draining and self.mailbox.depth == 0 and actor.drained():
                self.quiet.set()
            try:
                message = await self.mailbox.get()
            except MailboxClosed:
                return  # an owned task crashed the actor; its error is on the way
            if not isinstance(message, Nudge):
                await self.handle(actor, message)
            # A full mailbox and a handler that never waits must not keep the loop from everybody else.
            await asyncio.sleep(0)

    async def handle(self, actor: Actor[Any], message: Any) -> None:
        """Hand one message to the actor; interrupted, it stays in `current` and counts as dropped."""
        self.current.append(message)
        begun = self.clock()
        try:
            await actor.handle(message)
        finally:
            self.busy_s += self.clock() - begun
        self.current.clear()
        self.handled += 1

    def finish(self) -> None:
        """Close the actor for good: nobody is left waiting for it."""
        self.empty()
        self.ref.fail_answers(self.error)
        self.quiet.set()

    def statistics(self) -> ActorStatistics:
        """Counts at this moment, over all instances."""
        error = self.last_error
        return ActorStatistics(
            name=self.name,
            alive=not self.mailbox.closed,
            mailbox=self.mailbox.statistics(),
            restarts=self.restarts_total,
            handled=self.handled,
            dropped=self.dropped,
            busy_s=self.busy_s,
            last_error=None if error is None else f"{type(error).__name__}: {error}",
        )
