"""kvblend: answers over retrieved chunks from their stored KV caches, wherever they stand in the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvblend.api.client import AsyncClient

__version__ = "0.1.0"
__all__ = ["AsyncClient", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the client on first use: `import kvblend` alone stays instant."""
    if name == "AsyncClient":
        from kvblend.api.client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module 'kvblend' has no attribute {name!r}")
