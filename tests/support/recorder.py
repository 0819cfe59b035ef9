"""Actors that write down what they are told, and a stage for the one under test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvblend.actors.runtime.actor import Actor, ActorRef
from kvblend.actors.runtime.mailbox import Mailbox
from kvblend.actors.runtime.supervisor import Supervisor

T = TypeVar("T")


class Recorder(Actor[Any]):
    """Puts every message into a queue."""

    def __init__(self, seen: asyncio.Queue[Any]) -> None:
        self.seen = seen

    async def handle(self, message: Any) -> None:
        self.seen.put_nowait(message)


class Stage:
    """A supervisor with recorders; `heard[name]` is what each was told, `crashes` what went wrong."""

    def __init__(self) -> None:
        self.heard: dict[str, asyncio.Queue[Any]] = {}
        self.crashes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.supervisor = Supervisor(lambda name, error, _: self.crashes.put_nowait((name, str(error))))

    def listen(self, name: str) -> ActorRef[Any]:
        seen = self.heard[name] = asyncio.Queue()
        return self.supervisor.spawn(lambda: Recorder(seen), 64, name)

    def play(self, name: str, factory: Callable[[], Actor[Any]]) -> ActorRef[Any]:
        return self.supervisor.spawn(factory, 64, name)

    async def hear(self, name: str, kind: type[T]) -> T:
        """The next message of this kind; others before it are lost."""
        while not isinstance(message := await self.heard[name].get(), kind):
            pass
        return message

    async def hear_until(self, name: str, last: Callable[[Any], bool]) -> list[Any]:
        """All messages before the first that `last` accepts."""
        seen: list[Any] = []
        while not last(message := await self.heard[name].get()):
            seen.append(message)
        return seen


def nobody(name: str) -> ActorRef[Any]:
    """A reference to an actor that has crashed."""
    mailbox: Mailbox[Any] = Mailbox(name, 1)
    mailbox.close()
    return ActorRef(mailbox)


@asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    stage = Stage()
    try:
        yield stage
    finally:
        await stage.supervisor.close()
