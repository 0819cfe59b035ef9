"""One response under way over HTTP: its stream translated, its state kept, its end said once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Generate
from kvblend.api.server.codec import Event
from kvblend.api.server.events import ResponseEvents
from kvblend.api.server.openai.event_log import EventLog
from kvblend.api.server.openai.kept import KeptResponses
from kvblend.api.server.port import EventStream, SystemPort

_log = logging.getLogger(__name__)


class Run:
    """Reads one stream. `ended` is set with the terminal event; `response` is the newest state.

    `kept` None means that the sender wants nothing to be kept (`store: false`). With `request`, what it answers is kept
    too, so that another can go on from it; with `log`, its events.
    """

    def __init__(
        self,
        system: SystemPort,
        stream: EventStream,
        translator: ResponseEvents,
        kept: KeptResponses | None,
        request: Generate | None = None,
        log: EventLog | None = None,
    ) -> None:
        self._system = system
        self._stream = stream
        self._translator = translator
        self._kept = kept
        self._request = request
        self._log = log
        self.cancelled = False
        self.ended = asyncio.Event()
        self.response: dict[str, Any] = {}
        self.failure: RequestError | None = None
        # so that it is known from the start, whoever reads the events
        self._note(translator.snapshot())

    async def events(self) -> AsyncIterator[list[Event]]:
        """The wire's events, as many at once as were there; the last list ends with the terminal one."""
        while events := await self._stream.drain():
            out = [event for one in events for event in self._translator.translate(one)]
            yield self._noted(out)
            if self._translator.terminal:
                return
        _log.error("the stream of %s ended without a terminal event", self._translator.response_id)
        yield self._noted(self._translator.fail("internal", "the response ended unexpectedly"))

    async def finish(self) -> dict[str, Any]:
        """Read to the end; the response. RequestError where it failed or the server cancelled it."""
        async for _ in self.events():
            pass
        if self.failure is not None:
            raise self.failure
        return self.response

    def cancel(self) -> None:
        """Ask for its end."""
        self.cancelled = True
        self._system.cancel_nowait(self._translator.response_id)

    def forget(self) -> None:
        """Ask for its end, and keep nothing of it."""
        if self._kept is not None:
            self._kept.drop(self._translator.response_id)
        self._kept = None
        self.cancel()

    def close(self) -> None:
        """Nobody reads it any more; one that had not ended counts as cancelled."""
        self._stream.abandon()
        if not self.ended.is_set():
            self._noted(self._translator.abort("the client went away"))

    def _noted(self, events: list[Event]) -> list[Event]:
        if self._log is not None:
            self._log.add(events, ended=self._translator.terminal)
        for event in events:
            if "response" in event:
                self._note(event["response"])
        return events

    def _note(self, response: dict[str, Any]) -> None:
        details = response.get("incomplete_details") or {}
        if details.get("reason") == "cancelled":
            response = {**response, "status": "cancelled"}
            if not self.cancelled:
                self.failure = RequestError("overloaded", details.get("detail", "cancelled"), retry_after_s=5.0)
        if error := response.get("error"):
            self.failure = RequestError(error["code"], error["message"], error["param"])
        self.response = response
        if self._kept is not None:
            self._kept.put(response, self._request, self._log)
        if self._translator.terminal:
            self.ended.set()
