"""A Hugging Face `config.json` as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvblend.engine.config import BadModelFile, ModelConfig, RopeConfig
from kvblend.engine.loaders.families import Family, find_family
from kvblend.engine.loaders.fields import get, maybe, need, positive
from kvblend.engine.loaders.hf_rope import FULL, SLIDING, parse_rope, parse_rope_pair


def parse_config(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model's sizes and switches; `generation` is generation_config.json, whose end tokens count too.

    UnsupportedModel names an architecture, activation, RoPE scaling or quantisation that is not executed here;
    BadModelFile names a missing or mistyped field.
    """
    family = find_family(data)
    heads = need(data, "num_attention_heads", int)
    hidden = need(data, "hidden_size", int)
    layers = need(data, "num_hidden_layers", int)
    if heads < 1:
        raise BadModelFile(f"num_attention_heads is {heads}; it must be at least 1")
    if layers < 1:
        raise BadModelFile(f"num_hidden_layers is {layers}; it must be at least 1")
    if data.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise BadModelFile(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given"
        )
    window, windowed = parse_windows(data, family, layers)
    rope, rope_local = parse_rope_pair(data, family) if family.gemma else (parse_rope(data, family), None)
    attention_bias = family.bias == "qkv" or (
        family.bias in ("fields", "attention") and get(data, "attention_bias", bool, False)
    )
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=need(data, "intermediate_size", int),
        num_heads=heads,
        num_kv_heads=_kv_heads(data, family, heads),
        head_dim=get(data, "head_dim", int, family.head_dim or hidden // heads),
        vocab_size=need(data, "vocab_size", int),
        context_length=_context(get(data, "max_position_embeddings", int, family.context), rope),
        rms_norm_eps=get(data, "rms_norm_eps", float, family.eps),
        rope=rope,
        tie_embeddings=get(data, "tie_word_embeddings", bool, family.tied),
        attention_bias=attention_bias,
        output_bias=False if family.bias == "qkv" else None,
        mlp_bias=family.bias == "fields" and get(data, "mlp_bias", bool, False),
        activation=family.activation,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        embedding_scale=float(hidden) ** 0.5 if family.gemma else 1.0,
        query_scale=_query_scale(data) if family.gemma else None,
        sliding_window=window,
        windowed_layers=windowed,
        rope_local=rope_local,
        bos_id=_first(_token_ids(data, "bos_token_id")),
        eos_ids=tuple(
            dict.fromkeys((*_token_ids(data, "eos_token_id"), *_token_ids(generation or {}, "eos_token_id")))
        ),
    )


def parse_windows(data: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window, and one mark per layer that has it; no marks: all layers, or none where there is no window.

    Raises BadModelFile for layer types that are not known, too few or too many, or need a window that is not given.
    """
    if family.windows == "none":
        return None, ()
    # null means that there is none; only a missing field takes the family's number
    window = maybe(data, "sliding_window", int) if "sliding_window" in data else family.window
    if family.windows == "all":
        return window, ()
    if family.windows == "qwen":
        window = window if get(data, "use_sliding_window", bool, False) else None
        first = get(data, "max_window_layers", int, 28)
        marks = tuple(window is not None and layer >= first for layer in range(num_layers))
    else:
        pattern = get(data, "sliding_window_pattern", int, get(data, "_sliding_window_pattern", int, 6))
        if pattern < 1:
            raise BadModelFile(f"sliding_window_pattern is {pattern}; it must be at least 1")
        marks = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    if data.get("layer_types") is not None:
        marks = _layer_types(data["layer_types"], num_layers)
    if window is None and any(marks):
        raise BadModelFile(f"layer_types has {SLIDING!r}, but sliding_window is not given or not in use")
    return (window, marks) if any(marks) else (None, ())


def _layer_types(types: Any, num_layers: int) -> tuple[bool, ...]:
    if not isinstance(types, list) or len(types) != num_layers:
        raise BadModelFile(f"layer_types is {types!r}; it must be a list of {num_layers} names")
    for name in types:
        if name not in (FULL, SLIDING):
            raise BadModelFile(f"layer_types holds {name!r}; known are {FULL}, {SLIDING}")
    return tuple(name == SLIDING for name in types)


def _kv_heads(data: Mapping[str, Any], family: Family, heads: int) -> int:
    """null means as many as heads; a missing field takes the family's number where it has one."""
    if "num_key_value_heads" not in data and family.kv_heads is not None:
        return family.kv_heads
    return get(data, "num_key_value_heads", int, heads)


def _context(positions: int, rope: RopeConfig) -> int:
    """How long a prompt and its answer may be: `max_position_embeddings`, more where RoPE is there to stretch it.

    With `dynamic` the field is the length trained for, and with `yarn` it may be (Qwen 2.5).
    """
    if rope.kind == "dynamic":
        return int(positions * rope.factor)
    if rope.kind == "yarn":
        return max(positions, int(rope.original_context * rope.factor))
    return positions


def _query_scale(data: Mapping[str, Any]) -> float:
    scalar = 256.0 if data.get("query_pre_attn_scalar") is None else positive(data, "query_pre_attn_scalar")
    return float(scalar**-0.5)


def _token_ids(data: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = data.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise BadModelFile(f"{name} holds {item!r}; token ids are whole numbers of at least 0")
    return tuple(values)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
