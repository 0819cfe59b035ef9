"""Servers that misbehave: one in front of a real one that cuts, stalls or corrupts, and one that answers garbage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self


class LoopbackServer:
    """Takes connections on a free port of the loopback interface, from `async with` on; `serve` handles each."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("the server does not run")
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise RuntimeError("a subclass says what is served")

    def drop_connections(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served in a task")
        self._tasks.add(task)
        self.connections += 1
        try:
            await self.serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self.drop_connections()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


class FaultProxy(LoopbackServer):
    """Hands bytes on to and from a Unix socket. A fault counts the bytes of replies from when it is planted.

    `flip_at`, `cut_at` and `stall_at` are such offsets: the byte there is changed, the connection is closed before it,
    or nothing more comes from it on, on any connection, while requests are still taken. `request_cut_at` closes before
    that byte of the requests. `faulted` is set when one has struck; `heal` takes them all away.
    """

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target
        self.heal()

    def heal(self) -> None:
        self.flip_at: int | None = None
        self.cut_at: int | None = None
        self.stall_at: int | None = None
        self.request_cut_at: int | None = None
        self.faulted = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(self._target)
        ways = [
            asyncio.create_task(self._hand_requests(reader, to_server)),
            asyncio.create_task(self._hand_replies(from_server, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # nothing may come between: this task can be cancelled again while it waits
            to_server.close()
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)

    async def _hand_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.request_cut_at is not None:
                self.request_cut_at -= len(data)
                if self.request_cut_at <= 0:
                    self.faulted.set()
                    return
            writer.write(data)
            await writer.drain()

    async def _hand_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := bytearray(await reader.read(65536)):
            if self.flip_at is not None and self.flip_at < len(data):
                data[self.flip_at] ^= 1
                self.flip_at = None
                self.faulted.set()
            if self.cut_at is not None and self.cut_at < len(data):
                writer.write(data[: self.cut_at])
                await writer.drain()
                self.faulted.set()
                return
            if self.stall_at is not None and self.stall_at < len(data):
                writer.write(data[: self.stall_at])
                self.stall_at = 0
                self.faulted.set()
                await asyncio.Event().wait()
            for name in ("flip_at", "cut_at", "stall_at"):
                if (at := getattr(self, name)) is not None:
                    setattr(self, name, at - len(data))
            writer.write(data)
            await writer.drain()


class GarbageServer(LoopbackServer):
    """Answers whatever comes with the same bytes; closes the connection after them if `hangs_up`."""

    def __init__(self, answer: bytes, *, hangs_up: bool = False) -> None:
        super().__init__()
        self._answer = answer
        self._hangs_up = hangs_up

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(self._answer)
            await writer.drain()
            if self._hangs_up:
                return
