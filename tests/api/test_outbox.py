from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from kvblend.api.server.codec import CODECS, Codec
from kvblend.api.server.outbox import Closing, Outbox


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


class Transport:
    """What a WebSocket writes to: takes frames until it is full."""

    def __init__(self, room: int = 1000, error: Exception | None = None) -> None:
        self.frames: list[bytes | str] = []
        self._room = room
        self._error = error

    async def send(self, message: Message) -> None:
        if message["type"] != "websocket.send":
            return
        if self._error is not None:
            raise self._error
        if len(self.frames) >= self._room:
            await asyncio.Event().wait()
        self.frames.append(message.get("bytes") or message.get("text") or b"")
        await asyncio.sleep(0)


async def outbox(transport: Transport, codec: Codec = CODECS["kvblend.v1.json"], stall_s: float = 20) -> Outbox:
    async def connect() -> Message:
        return {"type": "websocket.connect"}

    websocket = WebSocket({"type": "websocket", "subprotocols": [], "headers": []}, connect, transport.send)
    await websocket.accept()
    return Outbox(websocket, codec, stall_s)


async def test_the_events_of_one_turn_stay_together() -> None:
    transport = Transport()
    box = await outbox(transport)
    turns = [[{"lane": name, "n": n} for n in range(3)] for name in "ab"]
    await asyncio.gather(*(box.send(turn) for turn in turns))
    lanes = [str(frame)[9] for frame in transport.frames]
    assert lanes == ["a"] * 3 + ["b"] * 3


async def test_a_client_that_does_not_read_closes_with_1013() -> None:
    box = await outbox(Transport(room=1), stall_s=0.05)
    with pytest.raises(Closing, match=r"0\.05 s") as caught:
        await box.send([{"n": 1}, {"n": 2}])
    assert caught.value.code == 1013


async def test_a_client_that_is_gone_needs_no_close() -> None:
    box = await outbox(Transport(error=OSError("gone")))
    with pytest.raises(Closing) as caught:
        await box.send([{"n": 1}])
    assert caught.value.code is None


async def test_msgpack_goes_out_as_bytes() -> None:
    transport = Transport()
    box = await outbox(transport, CODECS["kvblend.v1.msgpack"])
    await box.send([{"n": 1}])
    assert transport.frames == [b"\x81\xa1n\x01"]
