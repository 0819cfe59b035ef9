"""A system that counts: every request through it, whichever wire it came by, shows in the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Failed, Finished, Generate, StreamEvent
from kvblend.api.server.openai.metrics import Metrics
from kvblend.api.server.port import EventStream, LibraryPort, ReadinessView, SystemPort


class MeteredSystem:
    """Fits `SystemPort`; passes everything on to the system it was made with."""

    def __init__(self, system: SystemPort, metrics: Metrics) -> None:
        self._system = system
        self._metrics = metrics

    @property
    def model(self) -> str:
        """See `SystemPort.model`."""
        return self._system.model

    @property
    def library(self) -> LibraryPort:
        """See `SystemPort.library`."""
        return self._system.library

    @property
    def fatal(self) -> asyncio.Future[None]:
        """See `SystemPort.fatal`."""
        return self._system.fatal

    def ready(self) -> ReadinessView:
        """See `SystemPort.ready`."""
        return self._system.ready()

    async def submit(self, request: Generate) -> EventStream:
        """See `SystemPort.submit`; the stream that comes back is counted."""
        try:
            stream = await self._system.submit(request)
        except RequestError as error:
            self._metrics.failed.labels(error.code).inc()
            raise
        return MeteredStream(stream, request, self._metrics)

    def cancel_nowait(self, request_id: str, detail: str = "cancelled by the client") -> None:
        """See `SystemPort.cancel_nowait`."""
        self._system.cancel_nowait(request_id, detail)

    async def drain(self, grace_s: float) -> None:
        """See `SystemPort.drain`."""
        await self._system.drain(grace_s)

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """See `SystemPort.figures`."""
        return self._system.figures()


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
