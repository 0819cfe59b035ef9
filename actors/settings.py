"""What a running system can be set to, with its limits. A leaf module; unset values are measured defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from kvblend.actors.errors import RequestError
from kvblend.engine.selectors.spec import (
    BadSelection,
    ChunkBudget,
    DivergenceOf,
    NamedLayers,
    ResidualName,
    SelectorName,
    SelectorSpec,
)

DEFAULT_SYSTEM = "You answer questions from the given passages. Be brief and exact."


@dataclass(frozen=True, slots=True)
class Settings:
    """One server's settings. `model` is a known name (`smollm2`), a Hugging Face directory or a GGUF file.

    `salt` goes into every chunk key. `kv_tokens_max` bounds the KV slots of all running requests together. `debug`
    checks the scheduler's invariants after every event. `warm_text` are paragraphs of the corpus for chunks to be
    computed behind, in place of the shipped ones. `gate_kl_max` is in nats per token; `force_blend` blends
    whatever the gate says.
    """

    model: str = "smollm2"
    store: Path | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    attention: Literal["auto", "sdpa", "xformers"] = "auto"
    threads: int = 0
    conditioning: Literal["system", "bare", "warm", "neighbours"] = "system"
    warm_text: str = ""
    system: str = DEFAULT_SYSTEM
    salt: str = ""
    recompute_ratio: float = 0.15
    selector: SelectorName = "divergence"
    check_layers: tuple[int, ...] = (1,)
    divergence: DivergenceOf = "k"
    recompute_ratios: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()
    score_layers: tuple[int, ...] | NamedLayers = "all"
    sinks: int = 0
    span: int = 1
    chunk_budget: ChunkBudget = "free"
    probes: float = 0.0
    residual: ResidualName = "none"
    residual_fraction: float = 0.8
    seed: int = 0
    blend_min_tokens: int = 256
    gate: Literal["auto", "off"] = "auto"
    gate_kl_max: float = 0.5
    force_blend: bool = False
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
            "gate_kl_max": (0.0, 1e6),
            "threads": (0, 1024),
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
            "conditioning": ("system", "bare", "warm", "neighbours"),
            "on_miss": ("fresh", "precompute"),
            "gate": ("auto", "off"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise RequestError(
                    "invalid_request", f"{name} is {getattr(self, name)!r}; choose {', '.join(allowed)}", name
                )

        try:
            _ = self.selection
        except BadSelection as error:
            raise RequestError("invalid_request", str(error), error.field) from None

    @property
    def selection(self) -> SelectorSpec:
        """How rows are chosen where a request says nothing else."""
        return SelectorSpec(**{name: getattr(self, name) for name in SelectorSpec.names()})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(f.name for f in fields(cls))
