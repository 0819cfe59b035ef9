"""uvicorn's protocols, made to end connections whose peer has stopped reading, sending or answering."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from kvblend.api.server.events import error_fields


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


class StallSafeHttp(H11Protocol):
    """As uvicorn's, but a connection is cut when its peer reads nothing for `stall_s` seconds, or takes longer than
    `head_s` seconds to send the head of a request. `on_stall` is told of the former.
    """

    stall_s = 30.0
    head_s = 30.0
    on_stall: Callable[[], None] = staticmethod(lambda: None)
    _stall_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """A head that came in whole ends the wait; a part of the next one begins another."""
        super().data_received(data)
        if self._upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_head_timer()
        else:
            self._wait_for_head()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """From here on it is the other protocol's."""
        self._upgraded = True
        super().handle_websocket_upgrade(event)

    def pause_writing(self) -> None:
        """The peer does not keep up."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_s, self._cut)

    def resume_writing(self) -> None:
        """It has read."""
        self._stop_stall_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone: so are the timers."""
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of all errors."""
        body = json.dumps({"error": error_fields("invalid_request", msg, None)}).encode()
        head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d"
        # behind an answer that is under way it would be read as a part of that one
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(head % len(body) + b"\r\n\r\n" + body)
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _cut(self) -> None:
        self.on_stall()
        self.transport.abort()


def http_protocol_with(stall_s: float, head_s: float, on_stall: Callable[[], None]) -> type[StallSafeHttp]:
    """The protocol class with these times."""
    attributes = {"stall_s": stall_s, "head_s": head_s, "on_stall": staticmethod(on_stall)}
    return type("StallSafeHttp", (StallSafeHttp,), attributes)
