"""The stages against transformers, float32: every variant of the architecture that is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import reference_from_gguf
from model_files import dense_logits, reference_logits, relative_error, save_llama
from tiny_models import tiny_config, tiny_model

from kvblend.engine.loaders.load import load_model

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "llama3": {"rope_parameters": LLAMA3},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "gqa 1": {"num_key_value_heads": 4},
    "gqa 4": {"num_key_value_heads": 1},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "head_dim": {"head_dim": 24},
    "sharded": {"shard": "40KB", "tie_word_embeddings": False},
    "eps": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = save_llama(tmp_path, **VARIANTS[name])
    ids = torch.randint(3, 320, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    ours = dense_logits(load_model(path, torch.float32, CPU).model, ids)
    assert relative_error(ours, reference_logits(path, ids)) < 1e-4


def test_smollm2_logits_equal_those_of_transformers(smollm2_path: Path) -> None:
    loaded = load_model(smollm2_path, torch.float32, CPU)
    text = "The old mill stood by the river, and in 1847 its wheel still turned. "
    ids = loaded.tokenizer.encode(text * 11, special=False)
    assert len(ids) > 190
    with torch.inference_mode():
        theirs = reference_from_gguf(smollm2_path)(torch.tensor([ids])).logits[0]
    assert relative_error(dense_logits(loaded.model, ids), theirs) < 1e-4


def test_projected_keys_are_not_rotated() -> None:
    model = tiny_model()
    hidden = model.embed(torch.tensor([5, 5]))
    _, keys, _ = model.project(0, hidden)
    assert torch.equal(keys[0], keys[1])


def test_bfloat16_stays_near_float64() -> None:
    ids = list(range(3, 40))
    exact = dense_logits(tiny_model(), ids)
    assert relative_error(dense_logits(tiny_model(dtype=torch.bfloat16), ids), exact) < 0.1


def test_logits_are_float32_whatever_the_dtype() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    assert model.logits(torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_narrow_norm_rounds_where_transformers_rounds() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = tiny_model(tiny_config(hidden_size=64), dtype=torch.bfloat16)
    norm = LlamaRMSNorm(64, eps=model.config.rms_norm_eps).to(torch.bfloat16)
    weight = model.weights.norm
    norm.weight.data.copy_(weight)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(model._norm(rows, weight), norm(rows))


def test_keys_are_normed_per_head_and_not_rotated() -> None:
    model = tiny_model(tiny_config(qk_norm=True))
    q, k, _ = model.project(0, model.embed(torch.tensor([5, 5, 9])))
    assert torch.equal(k[0], k[1])
    layer = model.weights.layers[0]
    for rows, weight in ((q, layer.q_norm), (k, layer.k_norm)):
        assert weight is not None
        assert torch.allclose((rows / weight).square().mean(-1), torch.ones(rows.shape[:2]).double(), atol=1e-3)


def test_embeddings_are_scaled_by_a_number_rounded_to_the_dtype() -> None:
    scale = 27.3
    model = tiny_model(tiny_config(embedding_scale=scale), dtype=torch.bfloat16)
    ids = torch.tensor([1, 2])
    assert torch.equal(model.embed(ids), model.weights.embedding[ids] * torch.tensor(scale).bfloat16())


def test_a_norm_in_float32_rounds_where_gemma_rounds() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    model = tiny_model(tiny_config(hidden_size=64, post_norms=True, qk_norm=True), dtype=torch.bfloat16)
    norm = Gemma3RMSNorm(64, eps=model.config.rms_norm_eps)
    norm.weight.data.copy_(model.weights.norm - 1.0)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(model._norm(rows, norm.weight.data + 1.0), norm(rows))


@pytest.mark.parametrize(("given", "want"), [(None, 8**-0.5), (0.3, 0.3)])
def test_the_scale_of_scores_may_be_given(given: float | None, want: float) -> None:
    assert tiny_model(tiny_config(query_scale=given)).scale == want
