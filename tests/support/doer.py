"""An actor that does what its messages say, and a supervisor that tells when it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvblend.actors.runtime.actor import Actor, Reply
from kvblend.actors.runtime.supervisor import Supervisor


@dataclass
class Do:
    """Have the actor run `action` and answer with what it returns."""

    action: Callable[[Actor[Do]], Awaitable[int]]
    reply: Reply[int] | None = None


class Doer(Actor[Do]):
    """Does what it is told."""

    def __init__(self, started: asyncio.Queue[str] | None = None) -> None:
        self.started = started
        self.stopped = False

    async def start(self) -> None:
        if self.started is not None:
            self.started.put_nowait(self.name)

    async def handle(self, message: Do) -> None:
        value = await message.action(self)
        if message.reply is not None:
            message.reply.send(value)

    async def stop(self) -> None:
        self.stopped = True


class Watched(Supervisor):
    """Tells when its actors start and restart."""

    def __init__(self) -> None:
        super().__init__()
        self.started: asyncio.Queue[str] = asyncio.Queue()

    async def crash(self) -> str:
        """Wait for the first restart; what the crash before it was."""
        for _ in range(2):
            await self.started.get()
        return str(self.statistics()["doer"].last_error)


def returning(value: int) -> Callable[[Actor[Do]], Awaitable[int]]:
    async def action(_: Actor[Do]) -> int:
        return value

    return action


async def fail(_: object = None) -> int:
    raise ArithmeticError("broken")


async def hang(_: object = None) -> int:
    await asyncio.Event().wait()
    return 0


async def await_cancelled(_: object = None) -> int:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.cancel()
    return await future
