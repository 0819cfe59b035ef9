"""One real actor between two mailboxes that a test reads, and a disk that fails or waits when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from core_driver import SYSTEM, A, key_of

from kvblend.actors.runtime.actor import Actor, ActorRef
from kvblend.actors.runtime.mailbox import Mailbox
from kvblend.actors.runtime.supervisor import Supervisor
from kvblend.store.files import AiofilesIO, FileRead
from kvblend.store.format import Buffer, KVShape
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore

SHAPE = KVShape(num_layers=3, num_kv_heads=1, head_dim=2, dtype="float32")


class GatedDisk(AiofilesIO):
    """The real disk. While `reads` or `writes` is clear, such calls wait there; `error` makes writes fail."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.writes = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.writes.set()
        self.reading = asyncio.Semaphore(0)
        self.read_count = 0
        self.error: OSError | None = None

    async def read_into(self, reads: Sequence[FileRead]) -> list[int | Exception]:
        self.read_count += 1
        self.reading.release()
        await self.reads.wait()
        return await super().read_into(reads)

    async def write_file(self, path: Path, parts: Sequence[Buffer]) -> int:
        await self.writes.wait()
        if self.error is not None:
            raise self.error
        return await super().write_file(path, parts)


class Rig:
    """`mail` is what the actor told the scheduler, `passed_on` what it told the other one."""

    def __init__(self) -> None:
        self.supervisor = Supervisor(self._crashed)
        self.mail: Mailbox[Any] = Mailbox("scheduler", 64)
        self.passed_on: Mailbox[Any] = Mailbox("peer", 64)
        self.scheduler: ActorRef[Any] = ActorRef(self.mail)
        self.peer: ActorRef[Any] = ActorRef(self.passed_on)
        self.crashes: asyncio.Queue[BaseException] = asyncio.Queue()
        self.actor: Actor[Any] | None = None
        self.ref: ActorRef[Any] | None = None

    def _crashed(self, _name: str, error: BaseException, _dropped: tuple[Any, ...]) -> None:
        self.crashes.put_nowait(error)

    def run(self, factory: Callable[[], Actor[Any]]) -> None:
        """Start the actor."""

        def make() -> Actor[Any]:
            self.actor = factory()
            return self.actor

        self.ref = self.supervisor.spawn(make, 64, "actor")

    def tell(self, *messages: object) -> None:
        assert self.ref is not None
        for message in messages:
            self.ref.tell_nowait(message)

    async def heard(self) -> Any:
        """The next thing the actor tells the scheduler."""
        return await asyncio.wait_for(self.mail.get(), 10.0)

    async def passed(self) -> Any:
        """The next thing it tells the other one."""
        return await asyncio.wait_for(self.passed_on.get(), 10.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let everybody run until it holds."""
        async with asyncio.timeout(10.0):
            while not condition():  # noqa: ASYNC110  (what is waited for sets no event)
                await asyncio.sleep(0)


@asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        await rig.supervisor.close()


def payloads(tokens: int, value: int = 1) -> list[memoryview]:
    """KV of a chunk, one writable payload per layer."""
    size = SHAPE.layer_bytes(tokens)
    return [memoryview(bytearray([value + layer]) * size) for layer in range(SHAPE.num_layers)]


async def put(store: ChunkStore, ids: tuple[int, ...], key: ChunkKey | None = None, cold: bool = True) -> ChunkKey:
    """Store a chunk; `cold` leaves it on disk only."""
    key = key or key_of(ids)
    await store.put(key, ids, payloads(len(ids)))
    if cold:
        store.evict_nowait(key.id)
    return key


async def put_prompt(store: ChunkStore) -> None:
    """The system prompt and chunk A, as a first request leaves them, on disk only."""
    await put(store, SYSTEM, key_of(SYSTEM, ()))
    await put(store, A)
