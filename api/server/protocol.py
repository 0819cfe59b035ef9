"""uvicorn's WebSocket protocol, made to end connections whose peer has stopped reading or answering."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState


class StallSafeProtocol(WebSocketsSansIOProtocol):
    """As uvicorn's, but a closed connection is cut after `linger_s` seconds however much is still unsent."""

    linger_s = 5.0
    _abort_timer: asyncio.TimerHandle | None = None

    async def send(self, message: Any) -> None:
        """Send an ASGI message; a close frame does not wait for room, which a stalled reader never makes."""
        if message["type"] == "websocket.close":
            self.writable.set()
            self._abort_later()
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            # refused with an answer of ours: without this uvicorn reports a handshake that was never completed
            self.handshake_complete = True

    def handle_close(self, event: Any) -> None:
        """The peer says goodbye: it may still not read what is on its way."""
        self._abort_later()
        super().handle_close(event)

    def keepalive_timeout(self) -> None:
        """No pong came: nothing can be flushed to such a peer."""
        super().keepalive_timeout()
        self.transport.abort()

    def shutdown(self) -> None:
        """The server stops."""
        self._abort_later()
        # the peer's own close may just have come in; then there is no close frame to send
        with contextlib.suppress(InvalidState):
            super().shutdown()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone: so is the timer."""
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
        super().connection_lost(exc)

    def _abort_later(self) -> None:
        if self._abort_timer is None and not self.disconnected:
            self._abort_timer = self.loop.call_later(self.linger_s, self.transport.abort)


def protocol_with(linger_s: float) -> type[StallSafeProtocol]:
    """The protocol class with this linger time: uvicorn takes classes, not instances."""
    return type("StallSafeProtocol", (StallSafeProtocol,), {"linger_s": linger_s})
