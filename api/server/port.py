"""What the wire needs of a running system: `actors.system.System` fits, and so does a scripted one in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvblend.actors.messages import Generate, StreamEvent


class EventStream(Protocol):
    """The events of one accepted request; `actors.streams.TokenStream` fits."""

    async def drain(self) -> list[StreamEvent]:
        """Wait for at least one event and return all there are, deltas joined; `[]` once the terminal one is out."""
        ...

    def abandon(self) -> None:
        """The reader is gone: frees what the request holds. Does nothing after the terminal event or a second time."""
        ...


class ReadinessView(Protocol):
    """Whether requests can be served, and why not."""

    @property
    def ok(self) -> bool:
        """True when requests are taken."""
        ...

    @property
    def reasons(self) -> tuple[str, ...]:
        """What is missing, or worse than it should be, in words."""
        ...

    @property
    def details(self) -> Mapping[str, object]:
        """Figures worth showing."""
        ...


class ChunkView(Protocol):
    """A stored chunk; `actors.messages.ChunkInfo` fits."""

    @property
    def id(self) -> str:
        """64 hex digits."""
        ...

    @property
    def tokens(self) -> int:
        """Its length."""
        ...

    @property
    def bytes(self) -> int:
        """Its size where it is stored."""
        ...


class LibraryPort(Protocol):
    """The stored chunks."""

    def of(self, tenant: str) -> LibraryPort:
        """Those of one tenant."""
        ...

    async def find(self, chunk_id: str) -> ChunkView | None:
        """The stored chunk of this id, if there is one."""
        ...

    async def page(self, after: str, limit: int) -> Sequence[ChunkView]:
        """At most `limit` stored chunks in the order of their ids, from behind `after` ("" is the start) on."""
        ...

    async def delete(self, chunk_id: str) -> bool:
        """Delete a stored chunk; False when there is none of this id."""
        ...


class SystemPort(Protocol):
    """A running system as the wire sees it. `submit` must be cancel-safe: raising, it leaves nothing accepted."""

    @property
    def model(self) -> str:
        """The model name served."""
        ...

    @property
    def library(self) -> LibraryPort:
        """The stored chunks."""
        ...

    @property
    def fatal(self) -> asyncio.Future[None]:
        """Done when the system is past saving and the process must end non-zero."""
        ...

    def ready(self) -> ReadinessView:
        """The state now."""
        ...

    async def submit(self, request: Generate) -> EventStream:
        """Take a request; its first event is `Accepted`. RequestError: refused before acceptance."""
        ...

    def cancel_nowait(self, request_id: str, detail: str = "cancelled by the client") -> None:
        """End this request soon with a terminal event; unknown ids are ignored."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and let what runs finish, at most `grace_s` seconds."""
        ...

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """Numbers for the metrics: `engine`, `store` (its statistics), and `actors` as `name.figure`."""
        ...
