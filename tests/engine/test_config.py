"""Model sizes are checked, and RoPE frequencies are the published ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import tiny_config

from kvblend.engine.config import BadModelFile, RopeConfig, UnsupportedModel

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


def test_default_frequencies_are_powers_of_the_base() -> None:
    assert RopeConfig(10000.0).inverse_frequencies(8) == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_llama3_frequencies_equal_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=parameters)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    assert LLAMA3.inverse_frequencies(128) == pytest.approx(theirs.tolist(), rel=1e-6)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = RopeConfig(5e5).inverse_frequencies(128), LLAMA3.inverse_frequencies(128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8.0)


def test_factors_of_a_file_divide_the_frequencies() -> None:
    rope = RopeConfig(10000.0, "llama3", freq_factors=(1.0, 2.0, 4.0, 8.0))
    assert rope.inverse_frequencies(8) == pytest.approx([1.0, 0.05, 0.0025, 0.000125])


HEADS: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4}
LONG = RopeConfig(
    1e4, "longrope", 4.0, original_context=64, short_factors=(1.0, 1.1, 1.2), long_factors=(1.0, 3.0, 9.0)
)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RopeConfig(1e4, "linear", 3.0), {"rope_type": "linear", "factor": 3.0}),
        (RopeConfig(1e4, "yarn", 4.0, original_context=64), {"rope_type": "yarn", "factor": 4.0}),
        (
            RopeConfig(1e4, "yarn", 4.0, original_context=64, beta_fast=6.0, beta_slow=2.0, truncate=False),
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 6.0, "beta_slow": 2.0, "truncate": False},
        ),
        (
            RopeConfig(1e4, "yarn", 8.0, original_context=64, mscale=2.0, mscale_all_dim=1.0),
            {"rope_type": "yarn", "factor": 8.0, "mscale": 2.0, "mscale_all_dim": 1.0},
        ),
        (
            RopeConfig(1e4, "yarn", 8.0, original_context=64, attention_factor=0.7),
            {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.7},
        ),
        (RopeConfig(1e4, "yarn", 0.5, original_context=64), {"rope_type": "yarn", "factor": 0.5}),
    ],
)
def test_scaled_frequencies_and_magnitude_equal_those_of_transformers(ours: RopeConfig, theirs: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 64, **theirs}
    config = LlamaConfig(**HEADS, max_position_embeddings=64, rope_parameters=parameters)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, None)
    assert ours.inverse_frequencies(64) == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert ours.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_by_length_equal_those_of_transformers(kind: str, num_tokens: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lists = {"short_factor": list(LONG.short_factors), "long_factor": list(LONG.long_factors)}
    more = {**lists, "original_max_position_embeddings": 64} if kind == "longrope" else {}
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
    config = LlamaConfig(hidden_size=24, num_attention_heads=4, max_position_embeddings=64, rope_parameters=parameters)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=num_tokens)
    ours = LONG if kind == "longrope" else RopeConfig(1e4, "dynamic", 4.0, original_context=64)
    assert ours.inverse_frequencies(6, num_tokens) == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert ours.magnitude == pytest.approx(magnitude)


def test_the_regime_says_which_prompts_share_frequencies() -> None:
    dynamic = RopeConfig(kind="dynamic", factor=2.0, original_context=64)
    assert [LONG.regime(n) for n in (1, 64, 65, 200)] == ["", "", "long", "long"]
    assert [dynamic.regime(n) for n in (64, 65, 66)] == ["", "dynamic:65", "dynamic:66"]
    assert LLAMA3.regime(1 << 20) == ""


def test_the_regime_of_a_model_counts_both_kinds_of_layers() -> None:
    local = replace(LONG, original_context=32, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)
    config = tiny_config(sliding_window=8, rope_local=local)
    assert config.rope_regime(32) == ""
    assert config.rope_regime(33) == "/long"


def test_part_of_a_head_has_frequencies_of_that_part() -> None:
    assert RopeConfig(rotary_fraction=0.5).inverse_frequencies(16) == RopeConfig().inverse_frequencies(8)


def test_another_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'su' is not supported; supported: default, linear, dynamic, yarn"):
        RopeConfig(kind="su")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"factor": 0.0}, "rope factor is 0.0"),
        ({"beta_fast": -1.0}, "rope beta_fast is -1.0"),
        ({"attention_factor": math.nan}, "rope attention_factor is nan"),
        ({"rotary_fraction": 1.5}, "rope rotary_fraction is 1.5"),
        ({"original_context": 0}, "rope original_context is 0"),
        ({"kind": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast 1.0 must not be below beta_slow 2.0"),
    ],
)
def test_a_bad_rope_parameter_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        RopeConfig(**change)


@pytest.mark.parametrize(
    ("windows", "position", "want"),
    [
        ({}, 99, [None] * 4),
        ({"sliding_window": 8}, 8, [8] * 4),
        ({"sliding_window": 8}, 7, [None] * 4),
        ({"sliding_window": 8, "windowed_layers": (True, False, True, False)}, 99, [8, None, 8, None]),
    ],
)
def test_a_layer_has_a_window_where_it_hides_something(
    windows: dict[str, Any], position: int, want: list[int | None]
) -> None:
    config = tiny_config(**windows)
    assert [config.window_of(layer, position) for layer in range(4)] == want


@pytest.mark.parametrize("theta", [0.0, -1.0, math.nan, math.inf])
def test_a_base_must_be_a_positive_number(theta: float) -> None:
    with pytest.raises(BadModelFile, match="rope theta"):
        RopeConfig(theta)


def test_llama3_factors_must_be_ordered() -> None:
    with pytest.raises(BadModelFile, match="high_freq_factor"):
        RopeConfig(kind="llama3", low_freq_factor=4.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"hidden_size": 1.5}, "hidden_size is 1.5"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_kv_heads": 4}, "num_kv_heads 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rope": RopeConfig(kind="llama3", freq_factors=(1.0,))}, "1 rope factors for 4 frequencies"),
        ({"rope": LONG}, "3 rope short_factors for 4 frequencies"),
        ({"rope": replace(LONG, short_factors=(1.0,) * 4)}, "3 rope long_factors for 4 frequencies"),
        ({"rope": replace(LONG, short_factors=(0.0,) * 4)}, "short_factors hold a number that is not positive"),
        ({"rope_local": RopeConfig(rotary_fraction=0.4)}, "rope rotates 3 of 8 numbers per head"),
        ({"rope": RopeConfig(kind="dynamic", rotary_fraction=0.25)}, "dynamic rope needs at least 4"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": True}, "sliding_window is True"),
        ({"sliding_window": 4, "windowed_layers": (True,)}, "1 marks for 4 layers"),
        ({"windowed_layers": (True,) * 4}, "sliding_window is not set"),
        ({"query_scale": 0.0}, "query_scale is 0.0"),
        ({"embedding_scale": math.inf}, "embedding_scale is inf"),
    ],
)
def test_a_bad_size_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        tiny_config(**change)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="activation 'relu' is not supported; supported: silu, gelu_tanh"):
        tiny_config(activation="relu")
