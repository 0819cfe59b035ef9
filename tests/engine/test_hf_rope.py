"""RoPE of configurations: both layouts, every scaling, and what transformers fills in."""

from __future__ import annotations

from typing import Any

import pytest

from kvblend.engine.config import BadModelFile, RopeConfig, UnsupportedModel
from kvblend.engine.loaders.families import FAMILIES
from kvblend.engine.loaders.hf_rope import parse_rope, parse_rope_pair

CONTEXT = {"max_position_embeddings": 256}
LISTS = {"short_factor": [1, 1.5], "long_factor": [1.0, 4.0]}
PHI3, GEMMA3 = FAMILIES["phi3"], FAMILIES["gemma3_text"]


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        ({"type": "linear", "factor": 2}, RopeConfig(5e5, "linear", 2.0)),
        ({"type": "dynamic", "factor": 2.0}, RopeConfig(5e5, "dynamic", 2.0, original_context=256)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            RopeConfig(5e5, "yarn", 4.0, original_context=64),
        ),
        (
            {"type": "yarn", "factor": 4.0, "beta_fast": 8, "attention_factor": 1.5, "mscale": 1.0, "truncate": False},
            RopeConfig(
                5e5,
                "yarn",
                4.0,
                original_context=256,
                beta_fast=8.0,
                attention_factor=1.5,
                mscale=1.0,
                truncate=False,
            ),
        ),
        (
            {"type": "longrope", **LISTS, "original_max_position_embeddings": 64},
            RopeConfig(5e5, "longrope", 4.0, original_context=64, short_factors=(1.0, 1.5), long_factors=(1.0, 4.0)),
        ),
    ],
)
@pytest.mark.parametrize("newer", [False, True])
def test_every_scaling_in_both_layouts(scaling: dict[str, Any], want: RopeConfig, newer: bool) -> None:
    older = {"rope_theta": 5e5, "rope_scaling": scaling}
    changed = {**scaling, "rope_type": scaling["type"], "rope_theta": 5e5}
    assert parse_rope({**CONTEXT, **({"rope_parameters": changed} if newer else older)}) == want


def test_the_length_beside_the_rope_fields_goes_first() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    data = {**CONTEXT, "rope_scaling": scaling, "original_max_position_embeddings": 32}
    assert parse_rope(data).original_context == 32


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_older_names_of_longrope_in_phi3(kind: str) -> None:
    data = {**CONTEXT, "rope_scaling": {"type": kind, **LISTS}, "original_max_position_embeddings": 64}
    assert parse_rope(data, PHI3) == RopeConfig(
        1e4, "longrope", 4.0, original_context=64, short_factors=(1.0, 1.5), long_factors=(1.0, 4.0)
    )


def test_phi3_takes_its_own_length_where_its_file_has_none() -> None:
    scaling = {"type": "longrope", **LISTS, "original_max_position_embeddings": 64}
    assert parse_rope({"max_position_embeddings": 131072, "rope_scaling": scaling}, PHI3).original_context == 4096


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_part_of_a_head_is_rotated_in_phi3(place: str) -> None:
    field = {"partial_rotary_factor": 0.75}
    data = field if place == "top" else {"rope_parameters": {"rope_type": "default", **field}}
    assert parse_rope(data, PHI3) == RopeConfig(rotary_fraction=0.75)


@pytest.mark.parametrize(
    "data",
    [
        {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ],
)
def test_gemma3_rotates_windowed_layers_by_a_base_of_their_own(data: dict[str, Any]) -> None:
    assert parse_rope_pair(data, GEMMA3) == (RopeConfig(2e6, "linear", 8.0), RopeConfig(500.0))


def test_gemma3_has_bases_where_its_file_has_none() -> None:
    assert parse_rope_pair({}, GEMMA3) == (RopeConfig(1e6), RopeConfig(1e4))


@pytest.mark.parametrize(
    ("family", "data", "named"),
    [
        ("llama", {"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported; supported: default, linear, dynamic"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear' is not supported; supported: default, l",
        ),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; supported: 1"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(family: str, data: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_rope(data, FAMILIES[family])


def test_other_scaling_of_gemma3_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'dynamic' is not supported; supported: default, linear"):
        parse_rope_pair({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, GEMMA3)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "linear"}, "factor is missing"),
        ({"type": "dynamic", "factor": -1.0}, "factor is -1.0"),
        ({"type": "yarn", "factor": "4"}, "factor is '4'"),
        ({"type": "longrope", "long_factor": [1.0, 4.0]}, "short_factor is None"),
        (
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings is 0",
        ),
    ],
)
def test_a_bad_parameter_is_named(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        parse_rope({**CONTEXT, "rope_scaling": scaling})
