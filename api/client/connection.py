"""One WebSocket shared by up to 16 requests at a time, each in a lane of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from kvblend.actors.messages import TERMINAL
from kvblend.api.client.errors import ConnectionLost, KvblendError, refused
from kvblend.api.client.inbox import Inbox
from kvblend.api.client.wire import SUBPROTOCOL, Frame, decode, encode, parse_event

_log = logging.getLogger(__name__)
LANES_MAX = 16
_RECEIVE_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class _Running:
    """The request that holds a lane: `number` tells its frames from those of the one before."""

    number: int
    inbox: Inbox


class LaneConnection:
    """An open connection. `on_free` is called whenever a lane becomes free or the connection ends."""

    def __init__(self, socket: ClientConnection, on_free: Callable[[], None]) -> None:
        self._socket = socket
        self._on_free = on_free
        self._lanes: dict[str, _Running] = {}
        self._number = 0
        self._lost: ConnectionLost | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read(), name="kvblend-client-reader")

    @classmethod
    async def open(
        cls, url: str, timeout_s: float, on_free: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> LaneConnection:
        """Connect; ServerBusy or RequestRefused if the server refuses, ConnectionLost if it cannot be reached."""
        try:
            socket = await connect(
                url,
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                additional_headers=headers,
                compression=None,
                max_size=_RECEIVE_BYTES_MAX,
                open_timeout=timeout_s,
                proxy=None if _is_loopback(url) else True,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            wait = error.response.headers.get("Retry-After", "")
            code = {429: "rate_limited", 503: "overloaded", 401: "unauthorized", 403: "forbidden"}.get(
                status, "refused"
            )
            message = f"{url} refused the connection with HTTP {status}"
            if status == 401:
                message += ": it wants an API key that it knows (api_key, or KVBLEND_API_KEY on the command line)"
            raise refused(status, code, message, retry_after_s=float(wait) if wait.isdigit() else None) from error
        except TimeoutError as error:
            raise ConnectionLost(f"cannot connect to {url}: no answer for {timeout_s:g} s") from error
        except (OSError, InvalidHandshake) as error:
            raise ConnectionLost(f"cannot connect to {url}: {error}") from error
        return cls(socket, on_free)

    @property
    def alive(self) -> bool:
        """Whether requests can still be sent."""
        return self._lost is None

    @property
    def free(self) -> bool:
        """Whether a lane is free."""
        return self.alive and len(self._lanes) < LANES_MAX

    def take(self) -> Ticket:
        """Hold a free lane for one request."""
        name = next(name for index in range(LANES_MAX) if (name := f"lane-{index}") not in self._lanes)
        self._number += 1
        running = self._lanes[name] = _Running(self._number, Inbox())
        return Ticket(self, name, running.number, running.inbox)

    async def send(self, data: bytes) -> None:
        """Send a frame, waiting for room; ConnectionLost."""
        try:
            await self._socket.send(data)
        except ConnectionClosed as error:
            raise _explain(error) from error

    def release(self, lane: str, number: int) -> None:
        """Free a lane if this request still holds it."""
        running = self._lanes.get(lane)
        if running is not None and running.number == number:
            del self._lanes[lane]
            self._on_free()

    def cancel_nowait(self, lane: str, number: int) -> None:
        """Ask the server to end this request; the lane is free when its terminal event has come."""
        running = self._lanes.get(lane)
        if running is None or running.number != number or not self.alive:
            return
        frame = {"type": "response.cancel", "stream_id": lane, "event_id": f"cancel-{number}"}
        task = asyncio.get_running_loop().create_task(self._post(encode(frame)), name="kvblend-client-cancel")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, data: bytes) -> None:
        # a connection that is lost has ended the request as well
        with contextlib.suppress(ConnectionLost):
            await self.send(data)

    async def close(self) -> None:
        """Close; requests still running get ConnectionLost."""
        # cancels that were just asked for go out first
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        lost = ConnectionLost("the client closed the connection")
        try:
            while True:
                self._dispatch(decode(await self._socket.recv()))
        except ConnectionClosed as error:
            lost = _explain(error)
        except KvblendError as error:
            lost = ConnectionLost(error.message)
            await self._socket.close(1002)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            lost = ConnectionLost(f"the server sent an event that cannot be understood: {error!r}")
            await self._socket.close(1002)
        finally:
            self._lost = lost
            for running in self._lanes.values():
                running.inbox.fail(lost)
            self._lanes.clear()
            self._on_free()

    def _dispatch(self, frame: Frame) -> None:
        lane = str(frame.get("stream_id", ""))
        running = self._lanes.get(lane)
        if frame.get("type") == "error":
            # of the request itself, or of its cancel, which found nothing to end
            if running is not None and frame.get("event_id") in (str(running.number), f"cancel-{running.number}"):
                running.inbox.fail(_refusal(frame))
                self.release(lane, running.number)
            elif not str(frame.get("event_id")).startswith("cancel-"):
                _log.warning("the server reports: %s", frame.get("error"))
            return
        event = parse_event(frame)
        if event is None or running is None:
            return
        running.inbox.push(event)
        if isinstance(event, TERMINAL):
            self.release(lane, running.number)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A lane held by one request."""

    connection: LaneConnection
    lane: str
    number: int
    inbox: Inbox

    async def send(self, frame: Frame) -> None:
        """Send the request's `response.create`."""
        data = encode({**frame, "stream_id": self.lane, "event_id": str(self.number)})
        await self.connection.send(data)

    def release(self) -> None:
        """Give the lane back unused."""
        self.connection.release(self.lane, self.number)

    def cancel_nowait(self) -> None:
        """End the request on the server."""
        self.connection.cancel_nowait(self.lane, self.number)


def _refusal(frame: Frame) -> KvblendError:
    error = frame["error"]
    return refused(frame["status"], error["code"], error["message"], error.get("param"), error.get("retry_after_s"))


def _explain(error: ConnectionClosed) -> ConnectionLost:
    close = error.rcvd or error.sent
    if close is None:
        return ConnectionLost("the connection to the server broke")
    reason = f": {close.reason}" if close.reason else ""
    by = "the server" if error.rcvd is not None and error.rcvd_then_sent is not False else "this client"
    return ConnectionLost(f"the connection was closed by {by} ({close.code}{reason})", close.code)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
