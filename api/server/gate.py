"""Who may come in: counts the connections, and turns newcomers away while the server drains."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvblend.actors.errors import RequestError
from kvblend.api.server.limits import ApiLimits


class Leaving(Protocol):
    """A connection that can be asked to end once its running responses have."""

    def finish(self) -> None:
        """Close (1012) as soon as nothing runs on it."""
        ...


class Gate:
    """All connections of one server. `slow_consumers` counts those that were cut because nobody read."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._connections: set[Leaving] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.slow_consumers = 0

    def check(self) -> None:
        """Raise RequestError `overloaded` when no further connection is taken."""
        self.check_draining()
        if len(self._connections) >= self._limits.connections_max:
            limit = self._limits.connections_max
            raise RequestError("overloaded", f"the limit of {limit} connections is reached", retry_after_s=1.0)

    def check_draining(self) -> None:
        """Raise RequestError `overloaded` while the server is shutting down."""
        if self.draining:
            raise RequestError("overloaded", "the server is shutting down", retry_after_s=5.0)

    def enter(self, connection: Leaving) -> None:
        """Count a connection in."""
        self._connections.add(connection)
        self._empty.clear()

    def leave(self, connection: Leaving) -> None:
        """Count it out again."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def close(self) -> None:
        """Take nothing new; every connection ends once its running responses have."""
        self.draining = True
        for connection in list(self._connections):
            connection.finish()

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all connections have ended; False if that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
