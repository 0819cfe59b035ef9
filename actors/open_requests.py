"""The accepted requests that have not ended: each one's stream, the job that feeds it, its deadline."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvblend.actors.messages import Failed, Finished, StreamEvent
from kvblend.actors.request_log import log_end
from kvblend.actors.streams import TokenStream


def stream_of(job_id: str) -> str:
    """The id of the request that a job belongs to; "" for a job of the scheduler's own."""
    return job_id.rpartition("#")[0]


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request. `cancelling` is set once a cancel is on its way: a second one would say nothing new."""

    stream: TokenStream
    job_id: str
    timer: asyncio.TimerHandle | None = None
    cancelling: bool = False


class OpenRequests:
    """Open requests by id.

    An id may come again once its request has ended, while the actors still clean up behind it; so every job gets an id
    of its own, and late news of the first job is not taken for news of the second. `on_abandon` is told the request id.
    """

    def __init__(self, on_abandon: Callable[[str], None]) -> None:
        self._on_abandon = on_abandon
        self._open: dict[str, OpenRequest] = {}
        self._numbers = itertools.count(1)
        self._quiet = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def ids(self) -> list[str]:
        """The ids of all open requests, oldest first."""
        return list(self._open)

    def get(self, request_id: str) -> OpenRequest | None:
        """The open request of this id, if there is one."""
        return self._open.get(request_id)

    def new_job_id(self, request_id: str) -> str:
        """An id that no job had before; `stream_of` leads back to the request."""
        return f"{request_id}#{next(self._numbers)}"

    def open(self, job_id: str) -> TokenStream:
        """Open the request of this job. Raises ValueError where one of the same id is open."""
        request_id = stream_of(job_id)
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is open already")
        stream = TokenStream(request_id, self._on_abandon)
        self._open[request_id] = OpenRequest(stream, job_id)
        return stream

    def arm(self, request_id: str, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after `delay_s` seconds unless the request has ended by then."""
        request = self._open.get(request_id)
        if request is not None:
            request.timer = asyncio.get_running_loop().call_later(delay_s, action)

    def push(self, event: StreamEvent) -> None:
        """Hand an event to its request's stream; a terminal one closes the request. Unknown ids are ignored."""
        request = self._open.get(event.request_id)
        if request is None:
            return
        request.stream.push_nowait(event)
        if not request.stream.ended:
            return
        del self._open[event.request_id]
        # the parts of an ingest have names like these; it has a line of its own
        if isinstance(event, Finished | Failed) and not event.request_id.startswith("/"):
            log_end(event)
        if request.timer is not None:
            request.timer.cancel()
        if not self._open:
            self._quiet.set()

    def push_of_job(self, event: StreamEvent) -> None:
        """Hand on an event that names a job; events of jobs that feed no open request end here."""
        request_id = stream_of(event.request_id)
        request = self._open.get(request_id)
        if request is not None and request.job_id == event.request_id:
            self.push(replace(event, request_id=request_id))

    def fail_all(self, reason: str) -> None:
        """End every open request as failed."""
        for request_id in self.ids():
            self.push(Failed(request_id, "internal", reason))

    async def until_quiet(self) -> None:
        """Wait until no request is open."""
        while self._open:
            self._quiet.clear()
            await self._quiet.wait()
