"""What a running system can be set to, with its limits. A leaf module; unset values are measured defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from kvblend.actors.errors import RequestError
from kvblend.engine.selectors.spec import (
    KL_MAX_LIMIT,
    BadSelection,
    ChunkBudget,
    DivergenceOf,
    NamedLayers,
    ResidualName,
    SelectorName,
    SelectorSpec,
)

DEFAULT_SYSTEM = "You answer questions from the given passages. Be brief and exact."
DEFAULT_RATIO = 0.15
OPTIONAL = frozenset(
    {"auto_ratio_floor", "max_kl", "disk_bytes_budget", "tenant_bytes_max", "itl_ms_max", "ratio_lever_floor"}
)
"""Numbers that may be None: without a limit, or not used."""
REMOTE_SCHEMES = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")


def tenant_salt(salt: str, tenant: str) -> str:
    """The salt of one tenant's chunks on a server with this `salt`; that itself where there is no tenant."""
    return f"{salt}/tenant:{tenant}" if tenant else salt


@dataclass(frozen=True, slots=True)
class Settings:
    """One server's settings. `model` is a known name (`smollm2`), a Hugging Face directory or a GGUF file.

    `salt` goes into every chunk key. `separator` parts chunks inside a text; empty, it parts nothing.
    `kv_tokens_max` bounds the KV slots of all running requests together, `kept_tokens_max` those of finished answers.
    `debug` checks the scheduler's invariants after every event. `warm_text` are paragraphs of the corpus for chunks to
    be computed behind, in place of the shipped ones; with `echo` such chunks are stored as behind a copy of themselves.
    `gate_kl_max` is in nats per token; `force_blend` blends whatever the gate says. `itl_ms_max` 0 or None is no bound.
    `keep_freed_memory` holds for the whole process, from the first system with it on, and with glibc only.
    """

    model: str = "smollm2"
    store: Path | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    store_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    device: str = "cpu"
    attention: Literal["auto", "sdpa", "xformers"] = "auto"
    threads: int = 0
    keep_freed_memory: bool = False
    conditioning: Literal["system", "bare", "warm", "neighbours"] = "system"
    warm_text: str = ""
    echo: bool = True
    system: str = DEFAULT_SYSTEM
    salt: str = ""
    separator: str = " # # "
    recompute_ratio: float | Literal["auto"] = 0.15
    auto_ratio_floor: float | None = None
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
    gate_kl_max: float = 0.4
    force_blend: bool = False
    max_kl: float | None = None
    on_miss: Literal["fresh", "precompute"] = "fresh"
    device_pool_bytes: int = 0
    device_pool_policy: Literal["lru", "cost"] = "lru"
    host_bytes_budget: int = 2 << 30
    host_policy: Literal["lru", "cost"] = "lru"
    disk_bytes_budget: int | None = None
    disk_policy: Literal["lru", "cost"] = "cost"
    tenant_bytes_max: int | None = None
    # it may hold a password
    remote: str = field(default="", repr=False)
    remote_timeout_ms: int = 1000
    remote_ttl_s: int = 0
    prefetch_layers_max: int = 4
    lookahead_requests_max: int = 4
    slow_loads: Literal["compute", "load"] = "compute"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    itl_ms_max: float | None = 1000.0
    policy: Literal["fcfs", "edf"] = "fcfs"
    ratio_lever_floor: float | None = None
    kv_tokens_max: int = 131072
    kept_tokens_max: int = 16384
    queue_requests_max: int = 256
    max_tokens_max: int = 4096
    documents_max: int = 256
    debug: bool = False

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "recompute_ratio": (0.0, 1.0),
            "auto_ratio_floor": (0.0, 1.0),
            "lookahead_requests_max": (0, 4096),
            "gate_kl_max": (0.0, 1e6),
            "max_kl": (0.0, KL_MAX_LIMIT),
            "threads": (0, 1024),
            "blend_min_tokens": (0, 1 << 30),
            "device_pool_bytes": (0, 1 << 50),
            "host_bytes_budget": (1 << 20, 1 << 50),
            "disk_bytes_budget": (1 << 20, 1 << 60),
            "tenant_bytes_max": (1, 1 << 60),
            "remote_timeout_ms": (1, 600_000),
            "remote_ttl_s": (0, 10 * 366 * 86400),
            "prefetch_layers_max": (1, 1024),
            "max_num_seqs": (1, 4096),
            "max_num_batched_tokens": (16, 1 << 24),
            "itl_ms_max": (0.0, 3.6e6),
            "ratio_lever_floor": (0.0, 1.0),
            "kv_tokens_max": (256, 1 << 32),
            "kept_tokens_max": (0, 1 << 32),
            "queue_requests_max": (1, 1 << 20),
            "max_tokens_max": (1, 1 << 24),
            "documents_max": (1, 1 << 20),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if name == "recompute_ratio" and value == "auto":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise RequestError("invalid_request", f"{name} must be a number, not {value!r}", name)
            if not low <= value <= high:
                raise RequestError("invalid_request", f"{name} is {value}; it must lie in {low:g}..{high:g}", name)
        choices: dict[str, tuple[str, ...]] = {
            "dtype": ("float32", "bfloat16"),
            "store_dtype": ("auto", "float32", "bfloat16", "int8"),
            "attention": ("auto", "sdpa", "xformers"),
            "conditioning": ("system", "bare", "warm", "neighbours"),
            "on_miss": ("fresh", "precompute"),
            "device_pool_policy": ("lru", "cost"),
            "host_policy": ("lru", "cost"),
            "disk_policy": ("lru", "cost"),
            "gate": ("auto", "off"),
            "slow_loads": ("compute", "load"),
            "policy": ("fcfs", "edf"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise RequestError(
                    "invalid_request", f"{name} is {getattr(self, name)!r}; choose {', '.join(allowed)}", name
                )
        self._check_together()
        try:
            _ = self.selection
        except BadSelection as error:
            raise RequestError("invalid_request", str(error), error.field) from None

    def _check_together(self) -> None:
        """Raise RequestError for settings that exclude each other, and for a remote tier's unknown kind of address."""
        if self.device_pool_bytes and self.device.partition(":")[0] != "cuda":
            raise RequestError(
                "invalid_request",
                f"device_pool_bytes is {self.device_pool_bytes}; on device {self.device!r} it must be 0: only a CUDA "
                "device has memory of its own to keep chunks in",
                "device_pool_bytes",
            )
        # the value is not shown: it may hold a password
        if self.remote and not self.remote.startswith(REMOTE_SCHEMES):
            schemes = ", ".join(REMOTE_SCHEMES)
            raise RequestError("invalid_request", f"remote must begin with one of {schemes}", "remote")
        if self.store_dtype == "float32" and self.dtype != "float32":
            raise RequestError(
                "invalid_request",
                f"store_dtype is 'float32'; it is wider than dtype {self.dtype!r}: choose auto, bfloat16, int8",
                "store_dtype",
            )

    @property
    def selection(self) -> SelectorSpec:
        """How rows are chosen where a request says nothing else."""
        return SelectorSpec(**{name: getattr(self, name) for name in SelectorSpec.names()})

    @property
    def ratio_floor(self) -> float:
        """The ratio where nothing else is said, and the lowest that `auto` gives."""
        if self.auto_ratio_floor is not None and self.recompute_ratio == "auto":
            return self.auto_ratio_floor
        return DEFAULT_RATIO if self.recompute_ratio == "auto" else self.recompute_ratio

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(f.name for f in fields(cls))
