"""The events of one request on their way to its reader: what `api` reads and the actors write.

Bounded by construction, so the producer never waits: neighbouring `Delta`s join while unread, and of every other kind
only the newest unread event is kept. At most six events wait, however slow the reader is. One loop, no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Failed, Finished, StreamEvent


class StreamEnded(RuntimeError):
    """An event was pushed after the terminal one: a bug of the producer."""


class _Text:
    """Unread `Delta`s that follow each other; joined once, when read, so that a slow reader costs no copies."""

    def __init__(self, first: Delta) -> None:
        self.request_id = first.request_id
        self.pieces = [first.text]
        self.token_ids = list(first.token_ids)
        self.logprobs = list(first.logprobs)

    def append(self, delta: Delta) -> None:
        self.pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)

    def join(self) -> Delta:
        return Delta(self.request_id, "".join(self.pieces), tuple(self.token_ids), tuple(self.logprobs))


class TokenStream:
    """Carries one request's events from the actors to one reader, in order, ending with exactly one terminal event.

    `on_abandon(request_id)` is called at most once, when the reader goes away before the terminal event.
    """

    def __init__(self, request_id: str, on_abandon: Callable[[str], None] | None = None) -> None:
        self.request_id = request_id
        self._on_abandon = on_abandon
        self._unread: list[_Text | StreamEvent] = []
        self._changed = asyncio.Event()
        self._terminal: Finished | Failed | None = None
        self._abandoned = False

    @property
    def terminal(self) -> Finished | Failed | None:
        """The terminal event as soon as it was pushed, read or not; None before."""
        return self._terminal

    @property
    def ended(self) -> bool:
        """Whether the terminal event was pushed (events may still be unread)."""
        return self._terminal is not None

    @property
    def abandoned(self) -> bool:
        """Whether the reader went away before the end."""
        return self._abandoned

    @property
    def depth(self) -> int:
        """How many events wait unread, joined `Delta`s counting as one: at most six."""
        return len(self._unread)

    def push_nowait(self, event: StreamEvent) -> None:
        """Add an event; never waits.

        Raises:
            StreamEnded: the terminal event was pushed before.
            ValueError: the event belongs to another request.
        """
        if event.request_id != self.request_id:
            raise ValueError(f"event of request {event.request_id!r} in the stream of {self.request_id!r}")
        if self._terminal is not None:
            raise StreamEnded(
                f"request {self.request_id}: {type(event).__name__} after {type(self._terminal).__name__}"
            )
        if isinstance(event, Finished | Failed):
            self._terminal = event
            self._unread.append(event)
        elif not self._abandoned:
            self._append(event)
        self._changed.set()

    def _append(self, event: StreamEvent) -> None:
        if isinstance(event, Delta):
            last = self._unread[-1] if self._unread else None
            if isinstance(last, _Text):
                last.append(event)
            else:
                self._unread.append(_Text(event))
            return
        for place, waiting in enumerate(self._unread):
            # In place: moved to the end, it would leave two texts side by side.
            if type(waiting) is type(event):
                self._unread[place] = event
                return
        self._unread.append(event)

    async def drain(self) -> list[StreamEvent]:
        """Wait for at least one event and return all there are; empty once the terminal event was handed out.

        Cancelling it loses nothing: events are taken only when they are returned.
        """
        while not self._unread and self._terminal is None:
            await self._wait()
        return self.drain_nowait()

    def drain_nowait(self) -> list[StreamEvent]:
        """Return all unread events, perhaps none."""
        events = [_event(waiting) for waiting in self._unread]
        self._unread.clear()
        return events

    def __aiter__(self) -> TokenStream:
        """Iterate single events; the iteration ends after the terminal one."""
        return self

    async def __anext__(self) -> StreamEvent:
        """Return the next event, waiting for it."""
        while not self._unread:
            if self._terminal is not None:
                raise StopAsyncIteration
            await self._wait()
        return _event(self._unread.pop(0))

    def abandon(self) -> None:
        """Say that the reader went away: calls `on_abandon` once if there is no terminal event yet. Idempotent.

        Unread and later events are dropped, save the terminal one, which the producer still owes.
        """
        if self._abandoned or self._terminal is not None:
            return
        self._abandoned = True
        self._unread.clear()
        if self._on_abandon is not None:
            self._on_abandon(self.request_id)

    async def result(self) -> tuple[str, Finished]:
        """Wait for the end; return all text that was not read before, joined, and the terminal event.

        Cancelling it loses nothing: unread text joins while it waits and is taken at the end.

        Raises:
            RequestError: the request failed; code, message and param are those of the `Failed` event.
        """
        while (terminal := self._terminal) is None:
            await self._wait()
        text = "".join(event.text for event in self.drain_nowait() if isinstance(event, Delta))
        if isinstance(terminal, Failed):
            raise RequestError(terminal.code, terminal.message, terminal.param)
        return text, terminal

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _event(waiting: _Text | StreamEvent) -> StreamEvent:
    return waiting.join() if isinstance(waiting, _Text) else waiting
