"""What belongs to the listening process rather than to the system behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`port` 0 picks a free one. `allow_origin` are the Origins that browser pages may come from."""

    host: str = "127.0.0.1"
    port: int = 8000
    allow_origin: tuple[str, ...] = ()
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
