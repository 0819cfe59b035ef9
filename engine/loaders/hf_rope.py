"""RoPE of a Hugging Face `config.json`, in the layout of transformers 5 and in the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvblend.engine.config import BadModelFile, RopeConfig, UnsupportedModel
from kvblend.engine.loaders.families import FAMILIES, Family
from kvblend.engine.loaders.fields import get, mapping, maybe, need, numbers, positive

THETA, THETA_GLOBAL = 10000.0, 1000000.0
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
# older names of the same scaling in Phi-3's files
_PHI3_NAMES = {"su": "longrope", "yarn": "longrope"}


def parse_rope(data: Mapping[str, Any], family: Family = FAMILIES["llama"]) -> RopeConfig:
    """RoPE of all layers, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

    UnsupportedModel names a scaling that is not executed for this family, BadModelFile a missing or mistyped field.
    """
    # the newer layout keeps everything in one place; a file may carry both, and then they agree
    rope = {**mapping(data, "rope_scaling"), **mapping(data, "rope_parameters")}
    return _read(rope, data, family, get(data, "rope_theta", float, THETA))


def parse_rope_pair(data: Mapping[str, Any], family: Family) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of the layers that see everything and of the windowed ones, for families where they differ.

    Before transformers 5: `rope_theta` and `rope_scaling` are of the former, `rope_local_base_freq` of the latter.
    Raises as `parse_rope`.
    """
    both = mapping(data, "rope_parameters")
    full = {**mapping(both, FULL), **mapping(data, "rope_scaling")}
    plain = _read(full, data, family, get(data, "rope_theta", float, THETA_GLOBAL))
    local = _read(mapping(both, SLIDING), data, family, get(data, "rope_local_base_freq", float, THETA))
    return plain, local


def _read(rope: Mapping[str, Any], data: Mapping[str, Any], family: Family, theta: float) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family.partial_rotary:
        kind = _PHI3_NAMES.get(kind, kind)
    if kind not in family.ropes:
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(family.ropes)}")
    theta = get(rope, "rope_theta", float, theta)
    fraction = get(rope, "partial_rotary_factor", float, get(data, "partial_rotary_factor", float, 1.0))
    if fraction != 1.0 and not family.partial_rotary:
        raise UnsupportedModel(f"partial_rotary_factor {fraction:g} is not supported; supported: 1")
    context = get(data, "max_position_embeddings", int, family.context)
    match kind:
        case "linear":
            return RopeConfig(theta, "linear", positive(rope, "factor"), rotary_fraction=fraction)
        case "dynamic":
            return RopeConfig(theta, "dynamic", positive(rope, "factor"), original_context=context)
        case "llama3":
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=positive(rope, "factor"),
                low_freq_factor=positive(rope, "low_freq_factor"),
                high_freq_factor=positive(rope, "high_freq_factor"),
                original_context=maybe(data, ORIGINAL, int) or need(rope, ORIGINAL, int),
            )
        case "yarn":
            return _read_yarn(rope, data, context, theta)
        case "longrope":
            return _read_longrope(rope, data, family, context, theta, fraction)
    return RopeConfig(theta=theta, rotary_fraction=fraction)


def _read_yarn(rope: Mapping[str, Any], data: Mapping[str, Any], context: int, theta: float) -> RopeConfig:
    original = _original(rope, data, context)
    return RopeConfig(
        theta,
        "yarn",
        _factor(rope, context, original),
        original_context=original,
        attention_factor=maybe(rope, "attention_factor", float),
        beta_fast=get(rope, "beta_fast", float, 0.0) or 32.0,
        beta_slow=get(rope, "beta_slow", float, 0.0) or 1.0,
        mscale=maybe(rope, "mscale", float),
        mscale_all_dim=maybe(rope, "mscale_all_dim", float),
        truncate=get(rope, "truncate", bool, True),
    )


def _read_longrope(
    rope: Mapping[str, Any], data: Mapping[str, Any], family: Family, context: int, theta: float, fraction: float
) -> RopeConfig:
    # Phi-3's configuration has the field even where its file has not, and what stands with RoPE does not count
    rope_or_phi3 = {**rope, ORIGINAL: family.context} if family.partial_rotary else rope
    original = _original(rope_or_phi3, data, context)
    return RopeConfig(
        theta,
        "longrope",
        _factor(rope, context, original),
        original_context=original,
        rotary_fraction=fraction,
        attention_factor=maybe(rope, "attention_factor", float),
        short_factors=numbers(rope, "short_factor"),
        long_factors=numbers(rope, "long_factor"),
    )


def _original(rope: Mapping[str, Any], data: Mapping[str, Any], context: int) -> int:
    """The length the model was trained for; the one beside the RoPE fields goes first, as in transformers."""
    found = maybe(data, ORIGINAL, int)
    found = get(rope, ORIGINAL, int, context) if found is None else found
    if found < 1:
        raise BadModelFile(f"{ORIGINAL} is {found}; it must be at least 1")
    return found


def _factor(rope: Mapping[str, Any], context: int, original: int) -> float:
    return context / original if rope.get("factor") is None else positive(rope, "factor")
