from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvblend.api.server.openai.exchange import ClientGone
from kvblend.api.server.openai.sse import PING, Emit, EventSource, frame


class Wire:
    """The two ASGI functions of one exchange; `gone` makes the client leave."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.wrote = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.wrote.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_a_frame_is_one_line_of_json() -> None:
    assert frame({"a": "x\ny"}, "e") == b'event: e\ndata: {"a":"x\\ny"}\n\n'


async def test_frames_are_sent_and_the_end_is_said_once() -> None:
    wire, ends = Wire(), []

    async def write(emit: Emit) -> None:
        await emit(b"one")
        await emit(b"two")

    await EventSource(write, lambda: ends.append(1), 60.0)({}, wire.receive, wire.send)
    assert (wire.body, ends) == (b"onetwo", [1])
    assert [message.get("more_body") for message in wire.sent] == [None, True, True, False]


async def test_a_client_that_leaves_cancels_the_writer() -> None:
    wire, ends, cancelled = Wire(), [], asyncio.Event()

    async def write(_emit: Emit) -> None:
        wire.gone.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(ClientGone):
        await EventSource(write, lambda: ends.append(1), 60.0)({}, wire.receive, wire.send)
    assert (cancelled.is_set(), ends) == (True, [1])


async def test_a_long_silence_is_broken_by_a_comment() -> None:
    wire = Wire()

    async def write(_emit: Emit) -> None:
        while PING not in wire.body:
            wire.wrote.clear()
            await wire.wrote.wait()

    async with asyncio.timeout(20):
        await EventSource(write, lambda: None, 0.01)({}, wire.receive, wire.send)
    assert PING.startswith(b":")
