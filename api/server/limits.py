"""Every limit of the wire, by name. Beyond one of them a client gets an error that names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Defaults of the server. Sizes in bytes, items or characters; times in seconds or milliseconds, as named.

    `stall_s` is how long one send may wait for a client that does not read before the connection is closed (1013).
    `close_grace_s` is how long a closed connection may take to flush and answer before it is cut. `body_s` is how long
    the head, and then the body, of an HTTP request may take to arrive. `prompts_max` is for one call of
    `/v1/completions`, `page_max` for one page of a list, `kept_*` for finished responses that can be asked for by id.
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
    body_s: float = 30.0
    prompts_max: int = 16
    prompt_ids_max: int = 1 << 18
    token_id_max: int = (1 << 31) - 1
    page_max: int = 1000
    kept_responses_max: int = 1024
    kept_chars_max: int = 16 << 20
