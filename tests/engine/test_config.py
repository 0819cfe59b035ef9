"""Model sizes are checked, and RoPE frequencies are the published ones."""

from __future__ import annotations

import math
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


def test_another_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'yarn'"):
        RopeConfig(kind="yarn")  # type: ignore[arg-type]


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
    ],
)
def test_a_bad_size_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        tiny_config(**change)
