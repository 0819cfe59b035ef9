"""What has come for one request and was not read yet: bounded, because unread deltas are joined."""

from __future__ import annotations

import asyncio
from collections import deque

from kvblend.actors.messages import Delta, IngestProgress, StreamEvent


class Inbox:
    """Events of one request in order, then possibly an exception. One reader."""

    def __init__(self) -> None:
        self._events: deque[StreamEvent] = deque()
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def push(self, event: StreamEvent) -> None:
        """Add an event; neighbouring deltas join, of neighbouring progress only the newest is kept."""
        last = self._events[-1] if self._events else None
        if isinstance(event, Delta) and isinstance(last, Delta):
            text, ids = last.text + event.text, last.token_ids + event.token_ids
            self._events[-1] = Delta(event.request_id, text, ids, last.logprobs + event.logprobs)
        elif isinstance(event, IngestProgress) and isinstance(last, IngestProgress):
            self._events[-1] = event
        else:
            self._events.append(event)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Raise `error` for the reader once it has read what came before; the first one counts."""
        self._error = self._error or error
        self._changed.set()

    async def get(self) -> StreamEvent:
        """The next event, waiting for it. Cancelling it loses nothing."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()
