"""A Hugging Face `config.json` of the Llama architecture as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvblend.engine.config import BadModelFile, ModelConfig, RopeConfig, UnsupportedModel

T = TypeVar("T", int, float, str, bool)


def parse_config(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model's sizes and switches; `generation` is generation_config.json, whose end tokens count too.

    UnsupportedModel names an architecture, activation, RoPE scaling or quantisation that is not executed here;
    BadModelFile names a missing or mistyped field.
    """
    _check_architecture(data)
    heads = _need(data, "num_attention_heads", int)
    hidden = _need(data, "hidden_size", int)
    if heads < 1:
        raise BadModelFile(f"num_attention_heads is {heads}; it must be at least 1")
    if data.get("head_dim") is None and hidden % heads:
        raise BadModelFile(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given"
        )
    return ModelConfig(
        num_layers=_need(data, "num_hidden_layers", int),
        hidden_size=hidden,
        intermediate_size=_need(data, "intermediate_size", int),
        num_heads=heads,
        num_kv_heads=_get(data, "num_key_value_heads", int, heads),
        head_dim=_get(data, "head_dim", int, hidden // heads),
        vocab_size=_need(data, "vocab_size", int),
        context_length=_get(data, "max_position_embeddings", int, 2048),
        rms_norm_eps=_get(data, "rms_norm_eps", float, 1e-6),
        rope=parse_rope(data),
        tie_embeddings=_get(data, "tie_word_embeddings", bool, False),
        attention_bias=_get(data, "attention_bias", bool, False),
        mlp_bias=_get(data, "mlp_bias", bool, False),
        bos_id=_first(_token_ids(data, "bos_token_id")),
        eos_ids=tuple(
            dict.fromkeys((*_token_ids(data, "eos_token_id"), *_token_ids(generation or {}, "eos_token_id")))
        ),
    )


def parse_rope(data: Mapping[str, Any]) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    parameters = data.get("rope_parameters") or {}
    scaling = data.get("rope_scaling") or {}
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise BadModelFile(f"{name} is {value!r}; it must be an object")
    # the newer layout keeps everything in one place; a file may carry both, and then they agree
    rope = {**scaling, **parameters}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported; supported: default, llama3")
    partial = _get(rope, "partial_rotary_factor", float, _get(data, "partial_rotary_factor", float, 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial:g} is not supported; supported: 1")
    theta = _get(rope, "rope_theta", float, _get(data, "rope_theta", float, 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_positive(rope, "factor"),
        low_freq_factor=_positive(rope, "low_freq_factor"),
        high_freq_factor=_positive(rope, "high_freq_factor"),
        original_context=_need(rope, "original_max_position_embeddings", int),
    )


def _check_architecture(data: Mapping[str, Any]) -> None:
    architectures = data.get("architectures") or ["LlamaForCausalLM"]
    kind = data.get("model_type")
    if kind != "llama":
        raise UnsupportedModel(f"model_type {kind!r} is not supported; supported: llama")
    if architectures != ["LlamaForCausalLM"]:
        raise UnsupportedModel(f"architectures {architectures!r} are not supported; supported: LlamaForCausalLM")
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; supported: silu")
    if quantization := data.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModel(f"quantization_config {method!r} is not supported; use unquantised safetensors or GGUF")


def _need(data: Mapping[str, Any], name: str, kind: type[T]) -> T:
    if data.get(name) is None:
        raise BadModelFile(f"{name} is missing")
    return _get(data, name, kind, kind())


def _get(data: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    value = data.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BadModelFile(f"{name} is {value!r}; it must be of type {kind.__name__}")
    return value


def _positive(data: Mapping[str, Any], name: str) -> float:
    value = _need(data, name, float)
    if not 0.0 < value < float("inf"):
        raise BadModelFile(f"{name} is {value}; it must be a positive number")
    return value


def _token_ids(data: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = data.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise BadModelFile(f"{name} holds {item!r}; token ids are whole numbers of at least 0")
    return tuple(values)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
