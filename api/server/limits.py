"""Every limit of the wire, by name. Beyond one of them a client gets an error that names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Defaults of the server. Sizes in bytes, items or characters; times in seconds or milliseconds, as named.

    `stall_s` is how long one send may wait for a client that does not read before the connection is closed (1013).
    `close_grace_s` is how long a closed connection may take to flush and answer before it is cut.
    """

    message_bytes_max: int = 4 << 20
    depth_max: int = 8
    items_max: int = 4096
    neighbours_max: int = 8
    containers_max: int = 16384
    connections_max: int = 1024
    lanes_max: int = 16
    lane_requests_max: int = 16
    messages_max: int = 256
    id_chars_max: int = 128
    stop_max: int = 16
    stop_chars_max: int = 256
    temperature_max: float = 2.0
    output_tokens_max: int = 1 << 20
    seed_max: int = (1 << 63) - 1
    deadline_ms_max: float = 3_600_000.0
    stall_s: float = 30.0
    ping_s: float = 20.0
    close_grace_s: float = 5.0
    drain_grace_s: float = 30.0
