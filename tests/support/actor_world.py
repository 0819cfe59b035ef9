"""A supervised actor whose every move a test can see, and the world it lives in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvblend.actors.runtime.actor import Actor, ActorRef, Reply
from kvblend.actors.runtime.supervisor import Supervisor

Message = str | Reply[int]


class Worker(Actor[Message]):
    """Handles words: "fail" crashes, "block" waits for the world's gate, others are noted; a reply gets their count."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: list[str] = []
        world.made.append(self)

    async def start(self) -> None:
        self.world.started.put_nowait(self.name)
        if self.world.start_fails:
            raise OSError("no folder")

    async def handle(self, message: Message) -> None:
        if isinstance(message, Reply):
            message.send(len(self.seen))
            return
        if message == "block":
            self.world.blocked.set()
            await self.world.gate.wait()
        if message == "fail":
            raise ArithmeticError("broken")
        self.seen.append(message)
        self.world.seen.append((self.name, message))

    async def start_drain(self) -> None:
        self.world.seen.append((self.name, "(draining)"))

    def drained(self) -> bool:
        return self.world.nothing_open

    async def stop(self) -> None:
        self.world.stopped.append(self.name)
        if self.world.stop_hangs:
            await asyncio.Event().wait()
        if self.world.stop_fails:
            raise OSError("cannot stop")


class World:
    """What a test sets and sees, and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.start_fails = self.stop_fails = self.stop_hangs = self.hook_fails = False
        self.nothing_open = True
        self.made: list[Worker] = []
        self.seen: list[tuple[str, str]] = []
        self.stopped: list[str] = []
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.blocked = asyncio.Event()
        self.gate = asyncio.Event()
        self.crashes: list[tuple[str, str, tuple[Any, ...]]] = []
        self.supervisor = Supervisor(self.on_crash, clock=lambda: self.now, stop_s_max=0.05)

    def on_crash(self, name: str, error: BaseException, dropped: tuple[Any, ...]) -> None:
        self.crashes.append((name, str(error), dropped))
        if self.hook_fails:
            raise LookupError("no such request")

    def spawn(self, name: str = "worker", capacity: int = 8) -> ActorRef[Message]:
        return self.supervisor.spawn(lambda: Worker(self), capacity, name)

    async def crash(self, ref: ActorRef[Message]) -> None:
        """Crash the actor and wait for the fresh one."""
        ref.tell_nowait("fail")
        await self.started.get()


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """A world whose actors are stopped at the end, whatever they wait for."""
    world = World()
    yield world
    world.stop_fails = world.stop_hangs = False
    world.gate.set()
    await world.supervisor.close()


async def started(world: World, capacity: int = 8) -> ActorRef[Message]:
    ref = world.spawn(capacity=capacity)
    await world.started.get()
    return ref


async def ask_count(ref: ActorRef[Message]) -> int:
    def build(reply: Reply[int]) -> Message:
        return reply

    return await ref.ask(build, 60.0)
