"""config.json: sizes, switches of every family, windows, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvblend.engine.config import BadModelFile, RopeConfig, UnsupportedModel
from kvblend.engine.loaders.families import FAMILIES
from kvblend.engine.loaders.hf_config import parse_config, parse_windows
from kvblend.engine.loaders.hf_rope import parse_rope

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


def test_other_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'ntk' is not supported; supported: default, linear"):
        parse_config({**BASE, "rope_scaling": {"type": "ntk", "factor": 2.0}})


@pytest.mark.parametrize("name", sorted(SCALED))
def test_a_missing_scaling_parameter_is_named(name: str) -> None:
    scaling = {k: v for k, v in SCALED.items() if k != name}
    with pytest.raises(BadModelFile, match=f"{name} is missing"):
        parse_rope({"rope_scaling": {"rope_type": "llama3", **scaling}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2_moe"}, "qwen2_moe"),
        ({"model_type": "qwen2"}, "Qwen2ForCausalLM"),
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


def of_family(kind: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": kind, "architectures": [FAMILIES[kind].architecture], **changes}


@pytest.mark.parametrize(
    ("kind", "changes", "want"),
    [
        ("llama", {"attention_bias": True}, (True, None, False)),
        ("llama", {"mlp_bias": True}, (False, None, True)),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, None, False)),
        ("phi3", {"attention_bias": True}, (False, None, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, None, False)),
        ("qwen3", {}, (False, None, False)),
    ],
)
def test_biases_are_where_the_family_has_them(
    kind: str, changes: dict[str, Any], want: tuple[bool, bool | None, bool]
) -> None:
    config = parse_config(of_family(kind, num_key_value_heads=2, **changes))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == want


def test_gemma3_has_its_switches() -> None:
    config = parse_config(of_family("gemma3_text", query_pre_attn_scalar=16))
    assert (config.activation, config.qk_norm, config.post_norms, config.tie_embeddings) == (
        "gelu_tanh",
        True,
        True,
        True,
    )
    assert (config.embedding_scale, config.query_scale, config.head_dim) == (8.0, 0.25, 256)
    assert (config.sliding_window, config.windowed_layers) == (4096, (True,) * 3)


def test_a_missing_number_of_kv_heads_is_the_family_s_and_null_is_all_heads() -> None:
    assert parse_config(of_family("mistral", num_attention_heads=16)).num_kv_heads == 8
    assert parse_config(of_family("mistral", num_key_value_heads=None)).num_kv_heads == 4


ALL, NONE = (True,) * 3, (False,) * 3


@pytest.mark.parametrize(
    ("kind", "fields", "want"),
    [
        ("llama", {"sliding_window": 8}, (None, ())),
        ("mistral", {}, (4096, ())),
        ("mistral", {"sliding_window": None}, (None, ())),
        ("mistral", {"sliding_window": 8}, (8, ())),
        ("phi3", {}, (None, ())),
        ("phi3", {"sliding_window": 8}, (8, ())),
        ("qwen2", {"sliding_window": 8}, (None, ())),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, (None, ())),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (8, (False, True, True))),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (4096, ALL)),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] + ["full_attention"] * 2},
         (4096, (True, False, False))),
        ("gemma3_text", {"sliding_window_pattern": 2}, (4096, (True, False, True))),
        ("gemma3_text", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, (None, ())),
    ],
)  # fmt: skip
def test_windows_are_where_the_family_has_them(kind: str, fields: dict[str, Any], want: object) -> None:
    assert parse_windows(fields, FAMILIES[kind], 3) == want


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention"]}, "it must be a list of 3 names"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "holds 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is not given or not in use"),
        ({"sliding_window": "8"}, "sliding_window is '8'"),
    ],
)
def test_bad_layer_types_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        parse_windows(fields, FAMILIES["qwen2"], 3)


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_scaling_lengthens_the_context_where_the_field_is_the_trained_length(
    scaling: dict[str, Any], want: int
) -> None:
    assert parse_config({**BASE, "rope_scaling": scaling}).context_length == want
