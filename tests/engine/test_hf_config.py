"""config.json: sizes, both layouts of RoPE, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvblend.engine.config import BadModelFile, RopeConfig, UnsupportedModel
from kvblend.engine.loaders.hf_config import parse_config, parse_rope

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
SCALED = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALED}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALED}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALED}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000, **SCALED}},
    ],
)
def test_both_layouts_of_llama3_rope_mean_the_same(rope: dict[str, Any]) -> None:
    assert parse_rope(rope) == LLAMA3


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        {"rope_theta": 1e5, "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_both_layouts_of_default_rope_mean_the_same(rope: dict[str, Any]) -> None:
    assert parse_rope(rope) == RopeConfig(theta=1e5)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
def test_other_scaling_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{kind}'"):
        parse_config({**BASE, "rope_scaling": {"type": kind, "factor": 2.0}})


@pytest.mark.parametrize("name", sorted(SCALED))
def test_a_missing_scaling_parameter_is_named(name: str) -> None:
    scaling = {k: v for k, v in SCALED.items() if k != name}
    with pytest.raises(BadModelFile, match=f"{name} is missing"):
        parse_rope({"rope_scaling": {"rope_type": "llama3", **scaling}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2"}, "qwen2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**BASE, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"hidden_size": 66}, "not a multiple"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id holds '2'"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        parse_config({**BASE, **change})


def test_heads_and_head_size_follow_from_what_is_given() -> None:
    config = parse_config(BASE)
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 16, False)


def test_a_given_head_size_counts() -> None:
    assert parse_config({**BASE, "head_dim": 24}).head_dim == 24


def test_end_tokens_are_joined_without_repeats() -> None:
    assert parse_config({**BASE, "eos_token_id": 2}, {"eos_token_id": [2, 3]}).eos_ids == (2, 3)
