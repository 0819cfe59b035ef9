"""Weights: what a file must hold, and how it is fused."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config

from kvblend.engine.config import BadModelFile, ModelConfig
from kvblend.engine.weights import build_weights, check_names, expected_shapes

CPU = torch.device("cpu")


def tensors_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(shape, float(number), dtype=torch.float64)
        for number, (name, shape) in enumerate(expected_shapes(config).items())
    }


def test_names_of_the_architecture_pass() -> None:
    check_names(tiny_config(), expected_shapes(tiny_config()))


def test_all_problems_are_told_at_once() -> None:
    shapes = expected_shapes(tiny_config())
    del shapes["model.norm.weight"]
    shapes |= {"extra": (1,), "model.embed_tokens.weight": (97, 47)}
    with pytest.raises(BadModelFile) as caught:
        check_names(tiny_config(), shapes)
    assert str(caught.value) == (
        "missing tensors: model.norm.weight; unexpected tensors: extra; "
        "model.embed_tokens.weight has shape [97, 47], expected [97, 48]"
    )


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(BadModelFile, match="and 34 more"):
        check_names(tiny_config(), {})


def test_projections_are_fused_in_the_order_they_are_split() -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    tensors = tensors_of(config)
    layer = build_weights(config, tensors.__getitem__, torch.float64, CPU).layers[1]
    p = "model.layers.1."
    assert torch.equal(layer.qkv, torch.cat([tensors[f"{p}self_attn.{n}_proj.weight"] for n in "qkv"]))
    assert layer.gate_up_bias is not None
    assert torch.equal(layer.gate_up_bias, torch.cat([tensors[f"{p}mlp.{n}_proj.bias"] for n in ("gate", "up")]))


def test_biases_are_absent_where_the_model_has_none() -> None:
    config = tiny_config()
    layer = build_weights(config, tensors_of(config).__getitem__, torch.float64, CPU).layers[0]
    assert (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias) == (None, None, None, None)


def test_the_output_projection_may_have_no_bias_where_the_others_have_one() -> None:
    config = tiny_config(attention_bias=True, output_bias=False)
    assert "model.layers.0.self_attn.o_proj.bias" not in expected_shapes(config)
    layer = build_weights(config, tensors_of(config).__getitem__, torch.float64, CPU).layers[0]
    assert layer.qkv_bias is not None
    assert layer.output_bias is None


def test_norms_of_heads_and_of_outputs_are_read() -> None:
    config = tiny_config(qk_norm=True, post_norms=True)
    tensors = tensors_of(config)
    layer = build_weights(config, tensors.__getitem__, torch.float64, CPU).layers[1]
    found = {
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        "post_attention_layernorm": layer.post_attention_norm,
        "pre_feedforward_layernorm": layer.mlp_norm,
        "post_feedforward_layernorm": layer.post_mlp_norm,
    }
    for name, tensor in found.items():
        assert tensor is not None
        assert torch.equal(tensor, tensors[f"model.layers.1.{name}.weight"])


@pytest.mark.parametrize(("post_norms", "kept"), [(True, torch.float32), (False, torch.bfloat16)])
def test_norms_with_a_folded_one_stay_in_float32(post_norms: bool, kept: torch.dtype) -> None:
    config = tiny_config(post_norms=post_norms, qk_norm=True)
    weights = build_weights(config, tensors_of(config).__getitem__, torch.bfloat16, CPU)
    layer = weights.layers[0]
    assert layer.q_norm is not None
    assert {t.dtype for t in (weights.norm, layer.attention_norm, layer.mlp_norm, layer.q_norm)} == {kept}
    assert layer.qkv.dtype == torch.bfloat16


def test_an_untied_head_is_its_own() -> None:
    config = tiny_config(tie_embeddings=False)
    tensors = tensors_of(config)
    weights = build_weights(config, tensors.__getitem__, torch.float64, CPU)
    assert torch.equal(weights.head, tensors["lm_head.weight"])


def test_every_tensor_is_read_once() -> None:
    config = tiny_config()
    tensors = tensors_of(config)
    names: list[str] = []

    def read(name: str) -> torch.Tensor:
        names.append(name)
        return tensors[name]

    build_weights(config, read, torch.float32, CPU)
    assert sorted(names) == sorted(tensors)
