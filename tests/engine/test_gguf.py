"""GGUF models against the Hugging Face directory they were written from, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf_files import gguf_name, interleave, reference_from_gguf, write_gguf
from model_files import dense_logits, relative_error, save_llama

from kvblend.engine.config import BadModelFile, UnsupportedModel
from kvblend.engine.loaders.gguf import open_gguf, to_half_split, to_hf_name
from kvblend.engine.loaders.load import load_model
from kvblend.engine.weights import expected_shapes

CPU = torch.device("cpu")
IDS = list(range(3, 100))


def opened(path: Path) -> None:
    with open_gguf(path):
        pass


def test_logits_equal_those_of_the_directory(llama_dir: Path, llama_gguf: Path) -> None:
    ours = dense_logits(load_model(llama_gguf, torch.float32, CPU).model, IDS)
    assert torch.equal(ours, dense_logits(load_model(llama_dir, torch.float32, CPU).model, IDS))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1], ids=lambda k: str(k.name))
def test_quantised_logits_equal_those_of_transformers(llama_dir: Path, tmp_path: Path, kind: Kind) -> None:
    names = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    path = write_gguf(tmp_path / "a.gguf", llama_dir, dict.fromkeys(names, kind))
    with torch.inference_mode():
        theirs = reference_from_gguf(path)(torch.tensor([IDS])).logits[0]
    assert relative_error(dense_logits(load_model(path, torch.float32, CPU).model, IDS), theirs) < 1e-4


def test_an_untied_head_and_biases_are_read(tmp_path: Path) -> None:
    directory = save_llama(tmp_path / "d", tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path / "a.gguf", directory)
    ours = dense_logits(load_model(path, torch.float32, CPU).model, IDS)
    assert torch.equal(ours, dense_logits(load_model(directory, torch.float32, CPU).model, IDS))


def test_rope_factors_are_the_llama3_scaling(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    directory = save_llama(tmp_path / "d", rope_parameters=rope, tie_word_embeddings=True)
    scaled = load_model(directory, torch.float32, CPU).model
    base = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = base / np.array(scaled.config.rope.inverse_frequencies(16))
    model = load_model(write_gguf(tmp_path / "a.gguf", directory, factors=factors.tolist()), torch.float32, CPU).model
    assert model.config.rope.kind == "llama3"
    assert relative_error(dense_logits(model, IDS), dense_logits(scaled, IDS)) < 1e-4


def test_half_split_undoes_the_interleaving() -> None:
    rows = np.arange(48, dtype=np.float32).reshape(24, 2)
    assert torch.equal(to_half_split(torch.from_numpy(interleave(rows, 3)), 3), torch.from_numpy(rows))


def test_half_split_takes_biases() -> None:
    assert to_half_split(torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]), 2).tolist() == list(range(8))


def test_every_tensor_of_the_architecture_has_its_name(llama_gguf: Path) -> None:
    with open_gguf(llama_gguf) as source:
        names = expected_shapes(source.config)
    assert [to_hf_name(gguf_name(name)) for name in names] == list(names)


def test_a_missing_tensor_is_named(llama_dir: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", llama_dir, skip=["blk.1.ffn_up.weight"])
    with pytest.raises(BadModelFile, match=r"a\.gguf: missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        opened(path)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"a\.gguf: architecture 'mamba'.*: llama, qwen2, qwen3, gemma3"):
        opened(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"llama__expert_count": 8}, "8 experts"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer 'bert'"),
        ({"tokenizer__ggml__pre": "tekken"}, "'tekken'"),
        ({"tokenizer__ggml__pre": None}, "'default'"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(
    llama_dir: Path, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        opened(write_gguf(tmp_path / "a.gguf", llama_dir, **fields))
    assert "a.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": "3"}, "llama.block_count is '3'"),
        ({"llama__block_count": 2}, r"unexpected tensors: model\.layers\.2"),
        ({"llama__attention__head_count": 0}, "head_count is 0"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__eos_token_id": 999}, "eos token is 999"),
    ],
)
def test_a_bad_field_is_named(llama_dir: Path, tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named) as caught:
        opened(write_gguf(tmp_path / "a.gguf", llama_dir, **fields))
    assert "a.gguf" in str(caught.value)


def test_no_scaling_may_be_said_aloud(llama_dir: Path, tmp_path: Path) -> None:
    opened(write_gguf(tmp_path / "a.gguf", llama_dir, llama__rope__scaling__type="none"))


def test_all_kinds_of_end_tokens_count(llama_dir: Path, tmp_path: Path) -> None:
    with open_gguf(write_gguf(tmp_path / "a.gguf", llama_dir, tokenizer__ggml__eot_token_id=0)) as source:
        assert source.config.eos_ids == (2, 0)


def test_a_model_without_a_template_gets_the_plain_one(llama_dir: Path, tmp_path: Path) -> None:
    with open_gguf(write_gguf(tmp_path / "a.gguf", llama_dir, tokenizer__chat_template=None)) as source:
        assert source.template.split(None, [("user", "q")])[-1] == "\n"
