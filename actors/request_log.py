"""One line in the log for each request that has ended: what was reused, and no text of it."""

from __future__ import annotations

import logging
from typing import Any

from kvblend.actors.messages import Failed, Finished

log = logging.getLogger("kvblend.requests")
_FIGURES = (
    "mode",
    "prompt_tokens",
    "output_tokens",
    "tokens_reused",
    "tokens_recomputed",
    "tokens_fresh",
    "chunk_hits",
    "chunk_misses",
)
_TIMES = ("ttft_ms", "queue_ms", "load_ms", "total_ms")


def log_end(event: Finished | Failed) -> None:
    """Write the line of this request; its figures are fields of the record. `outcome` is a finish reason or a code."""
    fields: dict[str, Any] = {"request_id": event.request_id}
    if isinstance(event, Failed):
        # the message may quote the request
        level = logging.WARNING if event.code == "internal" else logging.INFO
        log.log(level, "request failed", extra={**fields, "outcome": event.code})
        return
    usage = event.usage
    fields |= {"outcome": event.reason}
    fields |= {name: getattr(usage, name) for name in _FIGURES}
    fields |= {name: round(getattr(usage, name), 1) for name in _TIMES}
    if event.chunks:
        fields["chunks_stored"] = len(event.chunks)
    log.info("request finished", extra=fields)
