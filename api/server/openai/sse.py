"""Server-sent events: an answer written piece by piece while its client is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from kvblend.api.server.openai.exchange import Receive, run_while_connected

Emit = Callable[[bytes], Awaitable[None]]
Send = Callable[[Any], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # proxies that collect an answer before they pass it on would defeat the purpose
    (b"x-accel-buffering", b"no"),
]


def frame(data: object, event: str = "") -> bytes:
    """One event: its name if it has one, and its data as JSON on one line."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


class EventSource:
    """An ASGI answer. `write` gets a function that sends frames; a send waits for a client that reads slowly.

    `write` is cancelled when the client goes away; then ClientGone is raised. `on_end` is called however it ends. A
    comment is sent when `ping_s` seconds passed without a frame, so that nobody takes a long prefill for a dead line.
    """

    def __init__(self, write: Callable[[Emit], Awaitable[None]], on_end: Callable[[], None], ping_s: float) -> None:
        self._write = write
        self._on_end = on_end
        self._ping_s = ping_s
        self._turn = asyncio.Lock()
        self._sent = 0

    async def __call__(self, _scope: Any, receive: Receive, send: Send) -> None:
        """Send the head, the frames, and the end."""

        async def emit(data: bytes) -> None:
            async with self._turn:
                self._sent += 1
                await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await run_while_connected(receive, self._run(emit))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()

    async def _run(self, emit: Emit) -> None:
        pinging = asyncio.create_task(self._ping(emit), name="sse-ping")
        try:
            await self._write(emit)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)

    async def _ping(self, emit: Emit) -> None:
        while True:
            before = self._sent
            await asyncio.sleep(self._ping_s)
            if self._sent == before:
                await emit(PING)
