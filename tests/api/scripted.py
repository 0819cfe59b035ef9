"""A system that says what a test tells it to, and a server around it. Loaded by the conftests, not by pytest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import (
    Accepted,
    ChunkInfo,
    Delta,
    Failed,
    Finished,
    Generate,
    IngestProgress,
    Planned,
    StoredChunk,
    Usage,
)
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.serve import serve

Script = Callable[[Generate, TokenStream], Awaitable[None]]
USAGE = Usage(
    prompt_tokens=100,
    output_tokens=3,
    chunk_hits=2,
    chunk_misses=1,
    tokens_reused=60,
    tokens_recomputed=10,
    tokens_fresh=30,
    charged_ratio=0.2,
    recompute_ratio=0.15,
    ttft_ms=5.0,
    total_ms=9.0,
    tiers={"host": 2},
)
WORDS = ("one", " two", " three")


@dataclass(frozen=True)
class Ready:
    ok: bool = True
    reasons: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)


async def answer(request: Generate, stream: TokenStream) -> None:
    """Says WORDS and stops; ingests get one progress event for each document."""
    name = request.request_id
    if not request.generate:
        total = len(request.documents)
        for index in range(total):
            stream.push_nowait(IngestProgress(name, index + 1, total))
        chunks = tuple(StoredChunk(f"chunk-{i}", len(d.text.split()), True) for i, d in enumerate(request.documents))
        stream.push_nowait(Finished(name, "stop", Usage(mode=request.blend.mode), chunks))
        return
    stream.push_nowait(Planned(name, USAGE))
    for index, word in enumerate(WORDS):
        stream.push_nowait(Delta(name, word, (index,)))
        # a turn of the loop, so that other streams get theirs
        await asyncio.sleep(0)
    stream.push_nowait(Finished(name, "stop", USAGE))


async def hold(request: Generate, stream: TokenStream) -> None:
    """Says one word and then nothing until it is cancelled."""
    stream.push_nowait(Delta(request.request_id, "one", (0,)))
    await asyncio.Event().wait()


class ScriptedLibrary:
    """Fits `LibraryPort` over a dictionary."""

    def __init__(self) -> None:
        self.chunks: dict[str, ChunkInfo] = {}
        self.tenants: dict[str, ScriptedLibrary] = {}

    def of(self, tenant: str) -> ScriptedLibrary:
        return self.tenants.setdefault(tenant, ScriptedLibrary())

    async def find(self, chunk_id: str) -> ChunkInfo | None:
        return self.chunks.get(chunk_id)

    async def page(self, after: str, limit: int) -> list[ChunkInfo]:
        return [self.chunks[name] for name in sorted(self.chunks) if name > after][:limit]

    async def delete(self, chunk_id: str) -> bool:
        return self.chunks.pop(chunk_id, None) is not None


class ScriptedSystem:
    """Fits `SystemPort`; keeps a record of everything that was asked of it."""

    model = "scripted"

    def __init__(self, script: Script = answer) -> None:
        self.script = script
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.readiness = Ready()
        self.library = ScriptedLibrary()
        self.numbers: dict[str, dict[str, float]] = {}
        self.refusal: RequestError | None = None
        self.requests: list[Generate] = []
        self.streams: dict[str, TokenStream] = {}
        self.cancelled: list[str] = []
        self.abandoned: list[str] = []
        self.changed = asyncio.Condition()
        self.settled = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._notices: set[asyncio.Task[None]] = set()

    def ready(self) -> Ready:
        return self.readiness

    def figures(self) -> dict[str, dict[str, float]]:
        return self.numbers

    async def submit(self, request: Generate) -> TokenStream:
        if self.refusal is not None:
            raise self.refusal
        name = request.request_id
        stream = self.streams[name] = TokenStream(name, self._on_abandon)
        self.requests.append(request)
        stream.push_nowait(Accepted(name, self.model))
        self._tasks[name] = asyncio.create_task(self._run(request, stream), name=f"script-{name}")
        self._notify()
        return stream

    def cancel_nowait(self, request_id: str, detail: str = "cancelled by the client") -> None:
        self.cancelled.append(request_id)
        self._stop(request_id)
        stream = self.streams.get(request_id)
        if stream is not None and not stream.ended:
            stream.push_nowait(Finished(request_id, "cancelled", USAGE, detail=detail))
        self._notify()

    async def drain(self, grace_s: float) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=grace_s)
        for name in list(self._tasks):
            self.cancel_nowait(name, "the server is shutting down")

    async def settle(self) -> None:
        self.settled += 1

    async def close(self) -> None:
        for name in list(self._tasks):
            self._stop(name)
        while self._notices:
            await asyncio.gather(*self._notices)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; looked at after every change here."""
        async with self.changed:
            await self.changed.wait_for(condition)

    @property
    def running(self) -> int:
        return len(self._tasks)

    async def _run(self, request: Generate, stream: TokenStream) -> None:
        try:
            await self.script(request, stream)
        except Exception as error:
            if not stream.ended:
                stream.push_nowait(Failed(request.request_id, "internal", str(error)))
        finally:
            self._tasks.pop(request.request_id, None)
            self._notify()

    def _on_abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)
        self._stop(request_id)
        self._notify()

    def _stop(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        task = asyncio.create_task(notify())
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)


@dataclass
class Server:
    """A running server: `stop.set()` ends it, `task` gives its exit code."""

    system: ScriptedSystem
    port: int
    stop: asyncio.Event
    task: asyncio.Task[int]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def peer(self, subprotocol: str | None = "kvblend.v1.msgpack", **options: Any) -> AsyncIterator[Peer]:
        """A connected raw client."""
        names = None if subprotocol is None else [Subprotocol(subprotocol)]
        url = f"{self.url}/v1/responses"
        options = {"max_queue": None, **options}
        async with connect(url, subprotocols=names, compression=None, proxy=None, **options) as socket:
            yield Peer(socket)


@dataclass
class Peer:
    """Sends and receives whole msgpack frames."""

    socket: ClientConnection

    async def create(self, **fields: Any) -> None:
        await self.send({"type": "response.create", "input": "what?", **fields})

    async def send(self, frame: object) -> None:
        await self.socket.send(msgpack.packb(frame))

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(20):
            data = await self.socket.recv()
        frame = msgpack.unpackb(data)
        assert isinstance(frame, dict)
        return frame

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        """Frames up to and with the first of one of these types."""
        frames = [await self.receive()]
        while frames[-1]["type"] not in kinds:
            frames.append(await self.receive())
        return frames

    async def finish(self) -> list[dict[str, Any]]:
        return await self.until("response.completed", "response.incomplete", "response.failed")

    async def error(self) -> dict[str, Any]:
        """The error object of the next frame, which must be an error event."""
        frame = await self.receive()
        assert frame["type"] == "error", frame
        return {**frame["error"], "status": frame["status"]}


@contextlib.asynccontextmanager
async def serving(
    system: ScriptedSystem, limits: ApiLimits | None = None, origins: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Server]:
    """A server on a free port of the loopback, stopped and drained on the way out."""
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve(
            system,
            "127.0.0.1",
            0,
            limits=limits or ApiLimits(drain_grace_s=0.0, close_grace_s=1.0),
            origins=origins,
            **options,
            on_listening=lambda _host, port: listening.set_result(port),
            stop=stop,
            handle_signals=False,
        ),
        name="server",
    )
    done, _ = await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        task.result()
    try:
        yield Server(system, listening.result(), stop, task)
    finally:
        stop.set()
        _, late = await asyncio.wait({task}, timeout=20)
        for task in late:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await system.close()
        if not task.cancelled():
            task.result()
