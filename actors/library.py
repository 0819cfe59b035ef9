"""The stored chunks as a user sees them: listed, looked at, deleted."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from kvblend.actors.messages import ChunkInfo
from kvblend.actors.settings import tenant_salt
from kvblend.store.store import ChunkStore


class Library:
    """A view of one store, of one tenant's chunks in it."""

    def __init__(self, store: ChunkStore, salt: str) -> None:
        self._store = store
        self._salt = salt

    def of(self, tenant: str) -> Library:
        """The same of one tenant of this server."""
        return Library(self._store, tenant_salt(self._salt, tenant))

    async def find(self, chunk_id: str) -> ChunkInfo | None:
        """The stored chunk of this id, if there is one."""
        found = await self._store.find(chunk_id, self._salt)
        return None if found is None else ChunkInfo(chunk_id, found.num_tokens, found.num_bytes)

    async def page(self, after: str, limit: int) -> list[ChunkInfo]:
        """At most `limit` stored chunks in the order of their ids, from behind `after` ("" is the start) on."""
        found = await self._store.page(after, limit, self._salt)
        return [ChunkInfo(one.id, one.num_tokens, one.num_bytes) for one in found]

    async def delete(self, chunk_id: str) -> bool:
        """Delete a stored chunk in every tier; False when it is unknown or cannot be removed."""
        return await self._store.delete(chunk_id, self._salt)

    def details(self) -> dict[str, Any]:
        """How many chunks there are here, and the remote tier's figures where there is one."""
        remote, stats = self._store.remote_figures(), self._store.stats()
        if remote is None:
            return {"chunks": stats.chunks}
        return {"chunks": stats.chunks, "remote": {**asdict(remote), "lost": stats.remote_lost}}

    def figures(self) -> dict[str, float]:
        """The plain numbers of the store's statistics, by name."""
        stats = self._store.stats()
        values = {field.name: getattr(stats, field.name) for field in fields(stats)}
        return {name: value for name, value in values.items() if isinstance(value, int | float)}
