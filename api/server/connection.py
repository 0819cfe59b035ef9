"""One WebSocket connection: reads frames, runs lanes, and leaves nothing behind when it ends."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import NoReturn

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from kvblend.actors.errors import RequestError
from kvblend.api.server.codec import Codec
from kvblend.api.server.events import error_event
from kvblend.api.server.gate import Gate
from kvblend.api.server.lane import Lane
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.kept import KeptResponses
from kvblend.api.server.outbox import Closing, Outbox
from kvblend.api.server.port import SystemPort
from kvblend.api.server.requests import Cancel, Create, FrameIds, parse_frame


class Connection:
    """An accepted WebSocket. `run` returns when it is over; all its responses have ended or are abandoned then."""

    def __init__(
        self,
        websocket: WebSocket,
        codec: Codec,
        system: SystemPort,
        gate: Gate,
        limits: ApiLimits,
        kept: KeptResponses | None = None,
    ) -> None:
        self._websocket = websocket
        self._codec = codec
        self._system = system
        self._gate = gate
        self._limits = limits
        self._kept = KeptResponses(limits) if kept is None else kept
        self._outbox = Outbox(websocket, codec, limits.stall_s)
        self._client = f"ws-{secrets.token_hex(8)}"
        self._lanes: dict[str, Lane] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._finish = asyncio.Event()

    def finish(self) -> None:
        """Close (1012) as soon as nothing runs here."""
        self._finish.set()

    async def run(self) -> None:
        """Serve until either side ends it."""
        self._gate.enter(self)
        closing = Closing(1011, "internal error")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_finish(), name="ws-finish")
                # raises Closing, which makes the group cancel every lane: each abandons its stream on its way out
                await self._read(tasks)
        except* Closing as group:
            closing = _first(group)
        finally:
            self._gate.slow_consumers += closing.code == 1013
            self._gate.leave(self)
            await self._close(closing)

    async def _watch_finish(self) -> NoReturn:
        await self._finish.wait()
        await self._idle.wait()
        raise Closing(1012, "the server is shutting down")

    async def _read(self, tasks: asyncio.TaskGroup) -> NoReturn:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                raise Closing(None)
            data = message.get("bytes") if self._codec.binary else message.get("text")
            if data is None:
                kind = "binary" if self._codec.binary else "text"
                raise Closing(1003, f"this subprotocol uses {kind} frames")
            error = self._take(data, tasks)
            if error is not None:
                await self._outbox.send([error])

    def _take(self, data: bytes | str, tasks: asyncio.TaskGroup) -> dict[str, object] | None:
        """Act on one frame; an error event if it is refused."""
        ids = FrameIds()
        try:
            frame = self._codec.decode(data, self._limits)
            ids = FrameIds.of(frame, self._limits)
            name = f"resp_{secrets.token_hex(16)}"
            command = parse_frame(frame, name, self._system.model, self._limits, self._kept.earlier)
            if isinstance(command, Create):
                self._start(replace(command, request=replace(command.request, client=self._client)), tasks)
            else:
                self._cancel(command)
        except RequestError as error:
            return error_event(error, ids)
        return None

    def _start(self, create: Create, tasks: asyncio.TaskGroup) -> None:
        self._gate.check_draining()
        name, limits = create.stream_id, self._limits
        lane = self._lanes.get(name)
        if lane is not None:
            if lane.waiting >= limits.lane_requests_max:
                message = f"stream_id: this lane has {lane.waiting} requests waiting; the limit is {lane.waiting}"
                raise RequestError("rate_limited", message, "stream_id", retry_after_s=1.0)
            lane.put(create)
            return
        if len(self._lanes) >= limits.lanes_max:
            message = (
                f"stream_id: {len(self._lanes)} lanes are busy on this connection; the limit is {limits.lanes_max}"
            )
            raise RequestError("rate_limited", message, "stream_id", retry_after_s=1.0)
        lane = Lane(self._system, self._outbox, self._gate, self._kept, extended=self._codec.extended)
        self._lanes[name] = lane
        lane.put(create)
        self._idle.clear()
        tasks.create_task(self._run_lane(name, lane), name=f"ws-lane-{name}")

    async def _run_lane(self, name: str, lane: Lane) -> None:
        try:
            await lane.run()
        finally:
            del self._lanes[name]
            if not self._lanes:
                self._idle.set()

    def _cancel(self, command: Cancel) -> None:
        if command.stream_id is not None:
            lane = self._lanes.get(command.stream_id)
            found = lane is not None and lane.cancel()
        else:
            found = any(lane.cancel(command.response_id) for lane in self._lanes.values())
        if not found:
            field = "stream_id" if command.stream_id is not None else "response_id"
            value = command.stream_id or command.response_id
            raise RequestError("not_found", f"{field}: nothing called {value!r} runs on this connection", field)

    async def _close(self, closing: Closing) -> None:
        if closing.code is None or self._websocket.client_state is WebSocketState.DISCONNECTED:
            return
        try:
            await self._websocket.close(closing.code, closing.reason)
        except (WebSocketDisconnect, RuntimeError):
            # the peer went away meanwhile: what the close was for has happened
            return


def _first(group: BaseExceptionGroup[Closing]) -> Closing:
    """The first word for the peer among several reasons to end; a peer that is gone needs none."""
    leaves: list[Closing] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        elif isinstance(error, Closing):
            leaves.append(error)
    return next((leaf for leaf in leaves if leaf.code is None), leaves[0])
