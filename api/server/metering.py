"""A system that counts: every request through it, whichever wire it came by, shows in the metrics."""

from __future__ import annotations

import time

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Failed, Finished, Generate, StreamEvent
from kvblend.api.server.forwarding import ForwardingSystem
from kvblend.api.server.openai.metrics import Metrics
from kvblend.api.server.port import EventStream, SystemPort


class MeteredSystem(ForwardingSystem):
    """Counts what is asked of the system it was made with."""

    def __init__(self, system: SystemPort, metrics: Metrics) -> None:
        super().__init__(system)
        self._metrics = metrics

    async def submit(self, request: Generate) -> EventStream:
        """See `SystemPort.submit`; the stream that comes back is counted."""
        try:
            stream = await self._system.submit(request)
        except RequestError as error:
            self._metrics.failed.labels(error.code).inc()
            raise
        return MeteredStream(stream, request, self._metrics)


class MeteredStream:
    """Fits `EventStream`; counts what passes through it, and its end once."""

    def __init__(self, stream: EventStream, request: Generate, metrics: Metrics) -> None:
        self._stream = stream
        self._request = request
        self._metrics = metrics
        self._last_s: float | None = None
        self._open = True
        metrics.connections.inc()

    async def drain(self) -> list[StreamEvent]:
        """See `EventStream.drain`."""
        events = await self._stream.drain()
        for event in events:
            self._count(event)
        return events

    def abandon(self) -> None:
        """See `EventStream.abandon`; a reader that goes away before the end is a request that was given up."""
        self._stream.abandon()
        if self._close():
            self._metrics.finished.labels("abandoned").inc()

    def _count(self, event: StreamEvent) -> None:
        if isinstance(event, Delta):
            self._count_tokens(max(1, len(event.token_ids)))
        elif isinstance(event, Finished) and self._close():
            self._metrics.count_end(event.reason, event.usage, generate=self._request.generate)
        elif isinstance(event, Failed) and self._close():
            self._metrics.failed.labels(event.code).inc()

    def _count_tokens(self, tokens: int) -> None:
        now_s = time.perf_counter()
        if self._last_s is not None:
            # several tokens that came at once are as many gaps of equal length
            for _ in range(min(tokens, 64)):
                self._metrics.itl.observe((now_s - self._last_s) / tokens)
        self._last_s = now_s

    def _close(self) -> bool:
        was, self._open = self._open, False
        if was:
            self._metrics.connections.dec()
        return was
