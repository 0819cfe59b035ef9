"""One request as its caller sees it: an async iterator of events that ends the request when it is left."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from kvblend.actors.messages import Accepted, Delta, Failed, Finished, StreamEvent, Usage
from kvblend.api.client.connection import Ticket
from kvblend.api.client.errors import GenerationFailed, ResponseTimeout
from kvblend.api.client.pool import Pool
from kvblend.api.client.wire import Frame


class Generation:
    """Starts with its first event asked for; yields `Accepted`, `Planned`, `Delta`... and `Finished` last.

    Leaving early cancels on the server: by `aclose()`, by the end of an `async with`, by cancelling `text()`, or by
    dropping the last reference. One reader at a time.
    """

    def __init__(self, pool: Pool, frame: Frame, timeout_s: float) -> None:
        self._pool = pool
        self._frame = frame
        self._timeout_s = timeout_s
        self._ticket: Ticket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pieces: list[str] = []
        self._finished: Finished | None = None
        self._over = False
        self.response_id: str | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event.

        Raises RequestRefused or ServerBusy (nothing ran), GenerationFailed, ConnectionLost or ResponseTimeout.
        """
        if self._over:
            raise StopAsyncIteration
        ticket = self._ticket or await self._start()
        try:
            async with asyncio.timeout(self._timeout_s):
                event = await ticket.inbox.get()
        except TimeoutError:
            await self.aclose()
            raise ResponseTimeout(
                f"the server said nothing for {self._timeout_s:g} s; the request was cancelled"
            ) from None
        except asyncio.CancelledError:
            # the reader was cancelled, not the request: it may come back for more
            raise
        except Exception:
            self._over = True
            raise
        return self._note(event)

    async def text(self) -> str:
        """Read to the end; the whole answer, events read before included. Raises as the iteration does."""
        try:
            async for _ in self:
                pass
        except BaseException:
            self._leave()
            raise
        return "".join(self._pieces)

    @property
    def text_so_far(self) -> str:
        """The text of the events read until now."""
        return "".join(self._pieces)

    @property
    def result(self) -> Finished:
        """The terminal event, once it was read; RuntimeError before."""
        if self._finished is None:
            raise RuntimeError("the generation has not finished: read its events or await text() first")
        return self._finished

    @property
    def usage(self) -> Usage:
        """The figures of the finished generation; RuntimeError before."""
        return self.result.usage

    async def aclose(self) -> None:
        """Leave: cancels on the server if it has not ended. Idempotent."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        ticket, loop = self._ticket, self._loop
        if not self._over and ticket is not None and loop is not None and not loop.is_closed():
            # the collector may run in any thread
            loop.call_soon_threadsafe(ticket.cancel_nowait)

    async def _start(self) -> Ticket:
        self._loop = asyncio.get_running_loop()
        try:
            ticket = await self._pool.take()
        except Exception:
            self._over = True
            raise
        self._ticket = ticket
        try:
            await ticket.send(self._frame)
        except asyncio.CancelledError:
            # the frame may be on its way
            self._leave()
            raise
        except Exception:
            self._over = True
            ticket.release()
            raise
        return ticket

    def _note(self, event: StreamEvent) -> StreamEvent:
        match event:
            case Accepted():
                self.response_id = event.request_id
            case Delta():
                self._pieces.append(event.text)
            case Finished():
                self._over = True
                self._finished = event
            case Failed():
                self._over = True
                raise GenerationFailed(event.code, event.message, event.param, "".join(self._pieces))
            case _:
                pass
        return event

    def _leave(self) -> None:
        if not self._over and self._ticket is not None:
            self._ticket.cancel_nowait()
        self._over = True
