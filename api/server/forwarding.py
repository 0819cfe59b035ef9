"""A system that passes everything on: what stands between the wire and a system changes only what it is there for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvblend.actors.messages import Generate
from kvblend.api.server.port import EventStream, LibraryPort, ReadinessView, SystemPort


class ForwardingSystem:
    """Fits `SystemPort`; the system behind it does all."""

    def __init__(self, system: SystemPort) -> None:
        self._system = system

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
        """See `SystemPort.submit`."""
        return await self._system.submit(request)

    def cancel_nowait(self, request_id: str, detail: str = "cancelled by the client") -> None:
        """See `SystemPort.cancel_nowait`."""
        self._system.cancel_nowait(request_id, detail)

    async def drain(self, grace_s: float) -> None:
        """See `SystemPort.drain`."""
        await self._system.drain(grace_s)

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """See `SystemPort.figures`."""
        return self._system.figures()
