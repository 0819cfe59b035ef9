"""What belongs to the listening process rather than to the system behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`port` 0 picks a free one. `allow_origin` are the Origins that browser pages may come from.

    `keys_file` None asks nobody for a key. The two limits are of each key, of all callers together where there are no
    keys; 0 is no limit.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allow_origin: tuple[str, ...] = ()
    keys_file: Path | None = None
    requests_per_minute_max: int = 0
    requests_running_max: int = 0
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
