"""The async client: light (websockets and msgpack only), the same typed events as inside the server."""

from __future__ import annotations

from kvblend.actors.messages import (
    Accepted,
    ChatMessage,
    Delta,
    Document,
    Finished,
    IngestProgress,
    Planned,
    StoredChunk,
    TokenLogprob,
    Usage,
)
from kvblend.api.client.client import AsyncClient
from kvblend.api.client.errors import (
    ConnectionLost,
    GenerationFailed,
    KvblendError,
    RequestRefused,
    ResponseTimeout,
    ServerBusy,
)
from kvblend.api.client.generation import Generation

__all__ = [
    "Accepted",
    "AsyncClient",
    "ChatMessage",
    "ConnectionLost",
    "Delta",
    "Document",
    "Finished",
    "Generation",
    "GenerationFailed",
    "IngestProgress",
    "KvblendError",
    "Planned",
    "RequestRefused",
    "ResponseTimeout",
    "ServerBusy",
    "StoredChunk",
    "TokenLogprob",
    "Usage",
]
