"""The shape of a model, independent of the file it came from. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
Activation = Literal["silu", "gelu_tanh"]


class UnsupportedModel(ValueError):
    """The model file is readable but asks for something this engine does not have; the message names it."""


class BadModelFile(ValueError):
    """A model file is damaged, incomplete or inconsistent; the message names the file, tensor or field."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of the model itself, with the scalings that transformers has.

    - `linear`: every frequency is divided by `factor`.
    - `dynamic`: the base grows with the prompt once that is longer than `original_context`.
    - `yarn`: high frequencies are kept, low ones divided by `factor`, with a ramp between `beta_fast` and `beta_slow`
      rotations over `original_context`; cos and sin are multiplied by `magnitude`.
    - `llama3`: wavelengths longer than `original_context / low_freq_factor` are stretched by `factor`, those shorter
      than `original_context / high_freq_factor` are kept, those between are blended.
    - `longrope`: one divisor per frequency, `short_factors` for prompts of up to `original_context` tokens and
      `long_factors` for longer ones; cos and sin are multiplied by `magnitude`.

    `freq_factors`, where the file carries them (GGUF's `rope_freqs.weight`), divide the base frequencies one by one and
    replace all of that. `rotary_fraction` of each head is rotated, the rest is not. `dynamic` and `longrope` depend on
    the prompt's length: see `regime`.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    freq_factors: tuple[float, ...] = ()
    rotary_fraction: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UnsupportedModel(f"RoPE scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        for name in ("theta", "factor", "beta_fast", "beta_slow", "rotary_fraction", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadModelFile(f"rope {name} is {value}; it must be a positive number")
        if self.rotary_fraction > 1:
            raise BadModelFile(f"rope rotary_fraction is {self.rotary_fraction}; it must be at most 1")
        if self.original_context < 1:
            raise BadModelFile(f"rope original_context is {self.original_context}; it must be at least 1")
        if self.kind == "llama3" and not self.freq_factors and self.high_freq_factor <= self.low_freq_factor:
            raise BadModelFile(
                f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )
        if self.kind == "yarn" and (self.theta == 1 or self.beta_fast < self.beta_slow):
            raise BadModelFile(
                f"rope beta_fast {self.beta_fast} must not be below beta_slow {self.beta_slow}, and theta not 1"
            )

    def check_head(self, head_dim: int) -> None:
        """Raise BadModelFile where these parameters do not fit heads of `head_dim`."""
        width = int(head_dim * self.rotary_fraction)
        if width % 2 or width < 2:
            raise BadModelFile(
                f"rope rotates {width} of {head_dim} numbers per head (rotary_fraction {self.rotary_fraction:g}); "
                "it must be an even number"
            )
        if self.kind == "dynamic" and width < 4:
            raise BadModelFile(f"dynamic rope needs at least 4 rotated numbers per head, this model has {width}")
        lists = {"rope factors": self.freq_factors} if self.freq_factors else {}
        if self.kind == "longrope" and not self.freq_factors:
            lists |= {"rope short_factors": self.short_factors, "rope long_factors": self.long_factors}
        for name, values in lists.items():
            if len(values) != width // 2:
                raise BadModelFile(f"{len(values)} {name} for {width // 2} frequencies")
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise BadModelFile(f"{name} hold a number that is not positive")

    def rotary_dim(self, head_dim: int) -> int:
        """How many leading numbers of a head are rotated."""
        return int(head_dim * self.rotary_fraction)

    def regime(self, num_tokens: int) -> str:
        """The set of frequencies for a prompt of `num_tokens`; "" is the one of short prompts.

        Stored K is un-rotated, but what a layer computed from rotated keys belongs to the regime it ran in: KV is exact
        only in a prompt of the same regime.
        """
        if num_tokens <= self.original_context or self.freq_factors:
            return ""
        return {"dynamic": f"dynamic:{num_tokens}", "longrope": "long"}.get(self.kind, "")

    @property
    def magnitude(self) -> float:
        """The number cos and sin are multiplied by (transformers' attention factor)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            if self.factor <= 1.0 or self.original_context < 2:
                return 1.0
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_context))
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(self.factor, self.mscale_all_dim)
        return _yarn_scale(self.factor, 1.0)

    def inverse_frequencies(self, head_dim: int, num_tokens: int = 0) -> list[float]:
        """`rotary_dim / 2` rotation speeds in radians per position, for a prompt of `num_tokens`."""
        width = self.rotary_dim(head_dim)
        theta = self.theta
        if self.kind == "dynamic" and not self.freq_factors:
            stretch = self.factor * max(num_tokens, self.original_context) / self.original_context - (self.factor - 1)
            theta *= stretch ** (width / (width - 2))
        base = [theta ** (-2.0 * i / width) for i in range(width // 2)]
        if self.freq_factors:
            return [f / c for f, c in zip(base, self.freq_factors, strict=True)]
        match self.kind:
            case "linear":
                return [f / self.factor for f in base]
            case "llama3":
                return [self._scale_llama3(f) for f in base]
            case "yarn":
                return self._scale_yarn(base, width)
            case "longrope":
                factors = self.long_factors if self.regime(num_tokens) else self.short_factors
                return [f / c for f, c in zip(base, factors, strict=True)]
        return base

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

    def _scale_yarn(self, base: list[float], width: int) -> list[float]:
        def turning_point(rotations: float) -> float:
            """The index (not whole) of the frequency that turns so often within the original context."""
            return width * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = turning_point(self.beta_fast), turning_point(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, width - 1.0)
        span = high - low if high != low else 0.001
        ramp = [min(1.0, max(0.0, (i - low) / span)) for i in range(len(base))]
        return [f * (1.0 - r) + f / self.factor * r for f, r in zip(base, ramp, strict=True)]


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder; the defaults are those of Llama.

    - `output_bias`: whether attention's output projection has a bias; None: as `attention_bias`.
    - `qk_norm`: RMS norm of every head of q and k, before rotation. `post_norms`: norms behind attention and behind the
      MLP too (Gemma 3). Norm weights multiply as they are: loaders fold a "1 + w" into them.
    - `query_scale`: what scores are multiplied by; None: `head_dim ** -0.5`. `embedding_scale` multiplies embeddings.
    - `sliding_window`: in windowed layers a row sees the keys at `position - sliding_window < key <= position`.
      `windowed_layers` marks them, one bool per layer; empty: all. `rope_local` is their RoPE; None: `rope`.
    """

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
    output_bias: bool | None = None
    activation: Activation = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    rope_local: RopeConfig | None = None
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
        for rope in (self.rope, self.rope_local):
            if rope is not None:
                rope.check_head(self.head_dim)
        if self.activation not in ("silu", "gelu_tanh"):
            raise UnsupportedModel(f"activation {self.activation!r} is not supported; supported: silu, gelu_tanh")
        for name in ("embedding_scale", "query_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadModelFile(f"{name} is {value}; it must be a positive number")
        self._check_window()

    def _check_window(self) -> None:
        window = self.sliding_window
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise BadModelFile(f"sliding_window is {window!r}; it must be a whole number of at least 1")
        if self.windowed_layers and len(self.windowed_layers) != self.num_layers:
            raise BadModelFile(f"windowed_layers has {len(self.windowed_layers)} marks for {self.num_layers} layers")
        if window is None and any(self.windowed_layers):
            raise BadModelFile("windowed_layers marks layers, but sliding_window is not set")

    def windowed(self, layer: int) -> bool:
        """Whether rows of `layer` see the sliding window only."""
        if self.sliding_window is None:
            return False
        return self.windowed_layers[layer] if self.windowed_layers else True

    def window_of(self, layer: int, position: int) -> int | None:
        """The window of `layer` for rows up to `position`; None where they see everything before them anyway."""
        return self.sliding_window if self.windowed(layer) and position >= (self.sliding_window or 0) else None

    def rope_regime(self, num_tokens: int) -> str:
        """`RopeConfig.regime` of all layers together; "" for models whose rotation does not depend on length."""
        local = "" if self.rope_local is None else self.rope_local.regime(num_tokens)
        return self.rope.regime(num_tokens) + (f"/{local}" if local else "")
