"""What a running system can be set to, with its limits. A leaf module; unset values are measured defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from kvblend.actors.errors import RequestError

DEFAULT_SYSTEM = "You answer questions from the given passages. Be brief and exact."


@dataclass(frozen=True, slots=True)
class Settings:
    """One server's settings. `model` is a known name (`smollm2`), a Hugging Face directory or a GGUF file.

    `salt` goes into every chunk key. `kv_tokens_max` bounds the KV slots of all running requests together. `debug`
    checks the scheduler's invariants after every event.
    """

    model: str = "smollm2"
    store: Path | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    attention: Literal["auto", "sdpa", "xformers"] = "auto"
    threads: int = 0
    conditioning: Literal["system", "bare"] = "system"
    system: str = DEFAULT_SYSTEM
    salt: str = ""
    recompute_ratio: float = 0.15
    check_layer: int = 1
    selector: Literal["divergence", "query"] = "divergence"
    divergence: Literal["k", "v", "kv"] = "k"
    residual: Literal["none", "mean", "distance", "ridge"] = "none"
    blend_min_tokens: int = 256
    on_miss: Literal["fresh", "precompute"] = "fresh"
    host_bytes_budget: int = 2 << 30
    prefetch_layers_max: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    kv_tokens_max: int = 131072
    queue_requests_max: int = 256
    max_tokens_max: int = 4096
    documents_max: int = 256
    debug: bool = False

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "recompute_ratio": (0.0, 1.0),
            "threads": (0, 1024),
            "check_layer": (1, 1_000),
            "blend_min_tokens": (0, 1 << 30),
            "host_bytes_budget": (1 << 20, 1 << 50),
            "prefetch_layers_max": (1, 1024),
            "max_num_seqs": (1, 4096),
            "max_num_batched_tokens": (16, 1 << 24),
            "kv_tokens_max": (256, 1 << 32),
            "queue_requests_max": (1, 1 << 20),
            "max_tokens_max": (1, 1 << 24),
            "documents_max": (1, 1 << 20),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise RequestError("invalid_request", f"{name} must be a number, not {value!r}", name)
            if not low <= value <= high:
                raise RequestError("invalid_request", f"{name} is {value}; it must lie in {low:g}..{high:g}", name)
        choices: dict[str, tuple[str, ...]] = {
            "dtype": ("float32", "bfloat16"),
            "attention": ("auto", "sdpa", "xformers"),
            "conditioning": ("system", "bare"),
            "selector": ("divergence", "query"),
            "divergence": ("k", "v", "kv"),
            "residual": ("none", "mean", "distance", "ridge"),
            "on_miss": ("fresh", "precompute"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise RequestError(
                    "invalid_request", f"{name} is {getattr(self, name)!r}; choose {', '.join(allowed)}", name
                )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(f.name for f in fields(cls))
