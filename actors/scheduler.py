"""The scheduler: the shell around `SchedulerState`, which sends its commands to the others."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from kvblend.actors.core import events as ev
from kvblend.actors.core.scheduler import SchedulerState
from kvblend.actors.messages import StreamEvent
from kvblend.actors.runtime.actor import Actor, ActorDied, ActorRef, Reply
from kvblend.actors.runtime.mailbox import MailboxClosed
from kvblend.actors.signals import BlenderMessage, LoaderMessage, Reset, SchedulerMessage, WhenIdle

log = logging.getLogger("kvblend.scheduler")


class Scheduler(Actor[SchedulerMessage]):
    """Handles one event at a time. `emit` hands stream events on; `check` validates the core after every event."""

    def __init__(
        self,
        state: SchedulerState,
        loader: Callable[[], ActorRef[LoaderMessage]],
        blender: Callable[[], ActorRef[BlenderMessage]],
        emit: Callable[[StreamEvent], None],
        check: bool = False,
    ) -> None:
        self.state = state
        self._loader = loader
        self._blender = blender
        self._emit = emit
        self._check = check
        self._waiting: list[Reply[bool]] = []

    async def start(self) -> None:
        """Have the others drop what a scheduler before this one asked for.

        In the user lane, behind its last commands: overtaken by the reset, they would leave slots that nobody frees.
        """
        for ref in (self._blender(), self._loader()):
            with contextlib.suppress(MailboxClosed):
                await ref.tell(Reset())

    async def handle(self, message: SchedulerMessage) -> None:
        """Apply an event and perform the commands; or promise an answer for when all is quiet."""
        if isinstance(message, WhenIdle):
            self._waiting.append(message.reply)
        else:
            for command in self.state.handle(message):
                await self._perform(command)
            if self._check:
                self.state.validate()
        if self.state.idle:
            for reply in self._waiting:
                reply.send(True)
            self._waiting.clear()

    async def _perform(self, command: ev.SchedulerCommand) -> None:
        match command:
            case ev.Emit(_, event):
                self._emit(event)
            case ev.Lookup() | ev.LookAhead() | ev.StartLoading() | ev.Release() | ev.StoreSegment() | ev.DropChunks():
                await self._send("loader", self._loader(), command)
            case _:
                await self._send("blender", self._blender(), command)

    async def _send(self, name: str, to: ActorRef[LoaderMessage] | ActorRef[BlenderMessage], command: object) -> None:
        try:
            await to.tell(command)  # type: ignore[arg-type]  # _perform pairs them
        except ActorDied:
            if isinstance(command, ev.FlagCancelled | ev.FreeSequence | ev.Release):
                return  # nothing is left to be freed
            # it is being replaced: what it held and this command are lost, whoever depends on them must hear of it
            log.warning("%s was not there to take %s", name, type(command).__name__)
            crash = ev.PeerCrashed("loader" if name == "loader" else "blender", time.monotonic())
            self.ref.tell_nowait(crash, "system")
        except MailboxClosed:
            log.debug("%s takes no more commands", name)
