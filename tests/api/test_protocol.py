from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kvblend.api.server.protocol import StallSafeProtocol, protocol_with

REQUEST = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class StuckTransport(asyncio.Transport):
    """A transport whose peer reads nothing: it never gets rid of its bytes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False
        self.aborted = asyncio.Event()

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True
        self.aborted.set()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def accept_then(app_end: Any) -> tuple[StallSafeProtocol, StuckTransport]:
    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await app_end(send)

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws_ping_interval=None)
    config.load()
    protocol = protocol_with(0.05)(config, ServerState(), {})
    transport = StuckTransport()
    protocol.connection_made(transport)
    protocol.data_received(REQUEST)
    await asyncio.gather(*protocol.tasks)
    return protocol, transport


async def test_a_close_is_written_although_the_transport_is_full() -> None:
    async def fill_and_close(send: Any) -> None:
        protocol_full.set()
        await send({"type": "websocket.close", "code": 1013, "reason": "slow"})

    protocol_full = asyncio.Event()
    original = StallSafeProtocol.send

    async def send(self: StallSafeProtocol, message: Any) -> None:
        if message["type"] == "websocket.close":
            self.pause_writing()
        await original(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StallSafeProtocol, "send", send)
        async with asyncio.timeout(10):
            protocol, transport = await accept_then(fill_and_close)
            assert b"slow" in transport.written
            await transport.aborted.wait()
    protocol.connection_lost(None)


async def test_a_peer_that_leaves_without_reading_is_cut() -> None:
    async def stay(_send: Any) -> None:
        return

    async with asyncio.timeout(10):
        protocol, transport = await accept_then(stay)
        protocol.data_received(bytes([0x88, 0x82, 0, 0, 0, 0]) + (1000).to_bytes(2))
        await transport.aborted.wait()
    protocol.connection_lost(None)


async def test_no_timer_is_left_when_the_connection_is_gone() -> None:
    async def close(send: Any) -> None:
        await send({"type": "websocket.close", "code": 1000})

    protocol, transport = await accept_then(close)
    protocol.connection_lost(None)
    await asyncio.sleep(0.1)
    assert not transport.aborted.is_set()
