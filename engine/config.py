"""The shape of a model, independent of the file it came from. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "llama3"]


class UnsupportedModel(ValueError):
    """The model file is readable but asks for something this engine does not have; the message names it."""


class BadModelFile(ValueError):
    """A model file is damaged, incomplete or inconsistent; the message names the file, tensor or field."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of the model itself.

    `llama3` scaling (four parameters, as in Llama 3.1's config.json): wavelengths longer than
    `original_context / low_freq_factor` are stretched by `factor`, those shorter than
    `original_context / high_freq_factor` are kept, those between are blended. `freq_factors`, where the file carries
    them (GGUF's `rope_freqs.weight`), divide the base frequencies one by one and replace the four parameters.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    freq_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("default", "llama3"):
            raise UnsupportedModel(f"RoPE scaling {self.kind!r} is not supported; supported: default, llama3")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise BadModelFile(f"rope theta is {self.theta}; it must be a positive number")
        if self.kind == "llama3" and not self.freq_factors and self.high_freq_factor <= self.low_freq_factor:
            raise BadModelFile(
                f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """`head_dim / 2` rotation speeds in radians per position."""
        base = [self.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
        if self.freq_factors:
            return [f / c for f, c in zip(base, self.freq_factors, strict=True)]
        if self.kind == "default":
            return base
        return [self._scale_llama3(f) for f in base]

    def _scale_llama3(self, frequency: float) -> float:
        wavelength = 2.0 * math.pi / frequency
        if wavelength < self.original_context / self.high_freq_factor:
            return frequency
        if wavelength > self.original_context / self.low_freq_factor:
            return frequency / self.factor
        smooth = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1.0 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder of the Llama architecture."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "context_length",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadModelFile(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise BadModelFile(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise BadModelFile(f"head_dim is {self.head_dim}; rotation needs an even number")
        if self.rope.freq_factors and len(self.rope.freq_factors) != self.head_dim // 2:
            raise BadModelFile(f"{len(self.rope.freq_factors)} rope factors for {self.head_dim // 2} frequencies")
