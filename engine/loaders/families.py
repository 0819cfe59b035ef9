"""The model families that run here: what their configurations leave unsaid, as transformers fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvblend.engine.config import ROPE_KINDS, Activation, RopeKind, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`. `context`, `eps`, `kv_heads`, `head_dim` and `window` stand in for fields that are missing.

    - `bias`: where projections have biases: by `attention_bias` and `mlp_bias` ("fields"), by `attention_bias` alone
      ("attention"), on q, k and v ("qkv"), or nowhere ("none").
    - `windows`: layers with a sliding window: "none", "all" of them where `sliding_window` is set, by `layer_types` and
      `max_window_layers` ("qwen"), or by `layer_types` and a repeating pattern ("gemma").
    - `fused`: q, k and v are one tensor in the file, and so are gate and up. `gemma`: norms multiply by 1 + their
      weight and stand behind attention and MLP too, embeddings are scaled, windowed layers have a RoPE of their own.
    """

    architecture: str
    context: int
    eps: float = 1e-6
    kv_heads: int | None = None
    head_dim: int | None = None
    ropes: tuple[RopeKind, ...] = ROPE_KINDS
    bias: Literal["fields", "attention", "qkv", "none"] = "none"
    windows: Literal["none", "all", "qwen", "gemma"] = "none"
    window: int | None = None
    activation_field: str = "hidden_act"
    activation: Activation = "silu"
    tied: bool = False
    qk_norm: bool = False
    partial_rotary: bool = False
    fused: bool = False
    gemma: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", 2048, bias="fields"),
    "mistral": Family("MistralForCausalLM", 131072, kv_heads=8, windows="all", window=4096),
    "qwen2": Family("Qwen2ForCausalLM", 32768, kv_heads=32, bias="qkv", windows="qwen", window=4096),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        32768,
        kv_heads=32,
        head_dim=128,
        bias="attention",
        windows="qwen",
        window=4096,
        qk_norm=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        4096,
        eps=1e-5,
        ropes=("default", "longrope"),
        windows="all",
        partial_rotary=True,
        fused=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        131072,
        kv_heads=4,
        head_dim=256,
        ropes=("default", "linear"),
        bias="attention",
        windows="gemma",
        window=4096,
        activation_field="hidden_activation",
        activation="gelu_tanh",
        tied=True,
        qk_norm=True,
        gemma=True,
    ),
}
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
}


def find_family(data: Mapping[str, Any]) -> Family:
    """The family of a config.json. UnsupportedModel names what is not executed here, and what is."""
    kind = data.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        why = " (it caps attention scores, which is not executed here)" if kind == "gemma2" else ""
        why = " (its text part alone, model_type gemma3_text, is)" if kind == "gemma3" else why
        raise UnsupportedModel(f"model_type {kind!r} is not supported{why}; supported: {', '.join(FAMILIES)}")
    architectures = data.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UnsupportedModel(f"architectures {architectures!r} are not supported; supported: {family.architecture}")
    names = ACTIVATIONS[family.activation]
    activation = data.get(family.activation_field) or names[0]
    if activation not in names:
        raise UnsupportedModel(
            f"{family.activation_field} {activation!r} is not supported; supported: {', '.join(names)}"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if data.get(name) is not None:
            raise UnsupportedModel(
                f"{name} {data[name]!r} is not supported: scores are not capped here; supported: null"
            )
    if data.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention true is not supported; supported: false")
    if quantization := data.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModel(f"quantization_config {method!r} is not supported; use unquantised safetensors or GGUF")
    return family
