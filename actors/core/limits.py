"""What the scheduler's core may use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvblend.actors.core.conditioning import Conditioning


@dataclass(frozen=True, slots=True)
class Limits:
    """KV pages of `page_tokens` tokens, sequences at a time, rows per step, and the rules of planning and loading.

    `layer_token_bytes` is what one token's KV of one layer takes where it is stored. With `computes_slow_loads` a chunk
    that loads slower than it computes is computed. `itl_ms_max` bounds the time of a step that running answers are in,
    `policy` orders the queue, `ratio_lever_floor` is how low load may press the ratio (None: not at all),
    `kept_pages_max` bounds what finished answers hold for the next turn.
    """

    pages: int
    page_tokens: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    blend_min_tokens: int = 256
    conditioning: Conditioning = field(default_factory=Conditioning)
    num_layers: int = 1
    layer_token_bytes: int = 0
    lookahead_requests_max: int = 4
    ratio_floor: float = 0.15
    computes_slow_loads: bool = True
    itl_ms_max: float | None = None
    policy: Literal["fcfs", "edf"] = "fcfs"
    ratio_lever_floor: float | None = None
    kept_pages_max: int = 0

    def pages_of(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_tokens)
