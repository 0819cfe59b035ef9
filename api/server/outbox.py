"""The writing half of one connection: whole frames in turn, and a timer for a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.websockets import WebSocket, WebSocketDisconnect

from kvblend.api.server.codec import Codec, Event


class Closing(Exception):
    """This connection must end: with `code` sent to the peer, or without a word (None: the peer is gone)."""

    def __init__(self, code: int | None, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Outbox:
    """Sends events; many lanes share it. A send waits while the transport is full: that is the back-pressure."""

    def __init__(self, websocket: WebSocket, codec: Codec, stall_s: float) -> None:
        self._websocket = websocket
        self._codec = codec
        self._stall_s = stall_s
        self._turn = asyncio.Lock()

    async def send(self, events: Iterable[Event]) -> None:
        """Send these events in one turn. Closing(1013): the client has not read for `stall_s` seconds."""
        async with self._turn:
            for event in events:
                frame = self._codec.encode(event)
                try:
                    async with asyncio.timeout(self._stall_s):
                        if isinstance(frame, str):
                            await self._websocket.send_text(frame)
                        else:
                            await self._websocket.send_bytes(frame)
                except TimeoutError:
                    raise Closing(1013, f"nothing was read for {self._stall_s:g} s") from None
                except WebSocketDisconnect:
                    raise Closing(None) from None
