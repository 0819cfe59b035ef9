"""One lane of a connection: requests of the same `stream_id` run one after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, replace

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Accepted, Finished, Generate, StreamEvent, Usage
from kvblend.api.server.codec import Event
from kvblend.api.server.events import ResponseEvents, error_event, plain_response
from kvblend.api.server.fields import PREVIOUS, relocate
from kvblend.api.server.gate import Gate
from kvblend.api.server.openai.kept import KeptResponses
from kvblend.api.server.outbox import Outbox
from kvblend.api.server.port import EventStream, SystemPort
from kvblend.api.server.requests import Create, FrameIds

_log = logging.getLogger(__name__)
CANCELLED = "cancelled by the client"


@dataclass(slots=True)
class _Job:
    """A request of the lane: `submitted` once the system has it; a cancel before that is only noted."""

    create: Create
    received_s: float
    submitted: bool = False
    cancelled: bool = False


class Lane:
    """Runs its requests in order and sends what they say."""

    def __init__(
        self, system: SystemPort, outbox: Outbox, gate: Gate, kept: KeptResponses | None = None, *, extended: bool
    ) -> None:
        self._system = system
        self._outbox = outbox
        self._gate = gate
        self._kept = kept
        self._extended = extended
        self._waiting: deque[_Job] = deque()
        self._current: _Job | None = None

    @property
    def waiting(self) -> int:
        """Requests behind the running one."""
        return len(self._waiting)

    def put(self, create: Create) -> None:
        """Queue a request; the caller bounds the queue."""
        self._waiting.append(_Job(create, asyncio.get_running_loop().time()))

    def cancel(self, response_id: str | None = None) -> bool:
        """Cancel one response, or all of the lane; False if there is no such response here."""
        found = False
        for job in (self._current, *self._waiting):
            if job is None or response_id not in (None, job.create.request.request_id):
                continue
            found = job.cancelled = True
            if job.submitted:
                self._system.cancel_nowait(job.create.request.request_id, CANCELLED)
        return found

    async def run(self) -> None:
        """Serve until nothing waits. Closing from the outbox, or a cancel from outside, abandons what runs."""
        while self._waiting:
            self._current = self._waiting.popleft()
            try:
                await self._serve(self._current)
            finally:
                self._current = None

    async def _serve(self, job: _Job) -> None:
        request = job.create.request
        ids = FrameIds(job.create.event_id, job.create.stream_id or None)
        translator = ResponseEvents(
            request.request_id,
            self._system.model,
            time.time(),
            ids,
            extended=self._extended,
            generate=request.generate,
            echo={PREVIOUS: job.create.previous} if request.generate else None,
        )
        if job.cancelled:
            await self._outbox.send(self._never_ran(translator, request))
            return
        try:
            self._gate.check_draining()
            stream = await self._system.submit(_with_time_left(job))
        except RequestError as error:
            await self._outbox.send([error_event(relocate(error, job.create.places), ids)])
            return
        except Exception:
            # a fault in one request must not take the connection's other lanes with it
            _log.exception("submitting %s failed", request.request_id)
            await self._outbox.send([error_event(RequestError("internal", "the request could not be taken"), ids)])
            return
        job.submitted = True
        try:
            if job.cancelled:
                self._system.cancel_nowait(request.request_id, CANCELLED)
            await self._forward(stream, translator, job.create)
        finally:
            stream.abandon()

    async def _forward(self, stream: EventStream, translator: ResponseEvents, create: Create) -> None:
        while events := await stream.drain():
            out = _translate(translator, events)
            # before it is sent: the next request may go on from it at once
            if translator.terminal and create.store and create.request.generate and self._kept is not None:
                self._kept.put(plain_response(out[-1]["response"]), create.request)
            await self._outbox.send(out)
        if not translator.terminal:
            _log.error("the stream of %s ended without a terminal event", translator.response_id)
            await self._outbox.send(translator.fail("internal", "the response ended unexpectedly"))

    def _never_ran(self, translator: ResponseEvents, request: Generate) -> list[Event]:
        """The events of a request cancelled before its turn: it was taken, so it has a terminal event too."""
        name = request.request_id
        end = Finished(name, "cancelled", Usage(mode=request.blend.mode), detail=CANCELLED)
        return _translate(translator, [Accepted(name, self._system.model), end])


def _translate(translator: ResponseEvents, events: list[StreamEvent]) -> list[Event]:
    return [out for event in events for out in translator.translate(event)]


def _with_time_left(job: _Job) -> Generate:
    """The request with its deadline counted from when its frame came in, not from its turn in the lane."""
    request = job.create.request
    if request.deadline_ms is None:
        return request
    left_ms = request.deadline_ms - (asyncio.get_running_loop().time() - job.received_s) * 1e3
    if left_ms <= 0:
        raise RequestError("deadline_exceeded", f"deadline_ms: {request.deadline_ms:g} ms passed in the lane's queue")
    return replace(request, deadline_ms=left_ms)
