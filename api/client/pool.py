"""The connections of one client: as many as its running requests need, opened when the others are full."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvblend.api.client.connection import LaneConnection, Ticket
from kvblend.api.client.errors import ConnectionLost


class Pool:
    """Hands out lanes, at most 16 to a connection and `connections_max` connections."""

    def __init__(
        self, url: str, timeout_s: float, connections_max: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = url
        self._headers = headers
        self._timeout_s = timeout_s
        self._connections_max = connections_max
        self._connections: list[LaneConnection] = []
        self._opening = asyncio.Lock()
        self._freed = asyncio.Event()
        self._closed = False

    @property
    def open_connections(self) -> int:
        """How many connections are held now."""
        return len(self._connections)

    async def take(self) -> Ticket:
        """A free lane, waiting for one if all connections are full. Raises as `LaneConnection.open`."""
        # one at a time: fifty requests at once need four connections, not fifty
        async with self._opening:
            while True:
                if self._closed:
                    raise ConnectionLost("the client is closed")
                await self._sweep()
                for connection in self._connections:
                    if connection.free:
                        return connection.take()
                if len(self._connections) < self._connections_max:
                    connection = await LaneConnection.open(self._url, self._timeout_s, self._freed.set, self._headers)
                    self._connections.append(connection)
                    continue
                self._freed.clear()
                await self._freed.wait()

    async def close(self) -> None:
        """Close all connections; whatever runs on them gets ConnectionLost."""
        self._closed = True
        self._freed.set()
        async with self._opening:
            connections, self._connections = self._connections, []
            await asyncio.gather(*(connection.close() for connection in connections))

    async def _sweep(self) -> None:
        dead = [connection for connection in self._connections if not connection.alive]
        self._connections = [connection for connection in self._connections if connection.alive]
        for connection in dead:
            await connection.close()
