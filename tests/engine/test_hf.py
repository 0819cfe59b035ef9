"""Hugging Face directories: what is accepted, and that every refusal names its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_files import CHATML, dense_logits, edit_json, save_llama
from safetensors.torch import load_file, save_file

from kvblend.engine.config import BadModelFile, UnsupportedModel
from kvblend.engine.loaders.hf import open_directory
from kvblend.engine.loaders.load import load_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
IDS = list(range(3, 40))


@pytest.fixture
def copied(llama_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(llama_dir, tmp_path / "model"))


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def opened(path: Path) -> None:
    with open_directory(path):
        pass


def test_a_missing_tensor_is_named(copied: Path) -> None:
    change_tensors(copied, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(BadModelFile, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        opened(copied)


def test_an_unexpected_tensor_is_named(copied: Path) -> None:
    change_tensors(copied, lambda t: t.update({"model.extra": torch.zeros(1)}))
    with pytest.raises(BadModelFile, match=r"unexpected tensors: model\.extra"):
        opened(copied)


def test_a_misshapen_tensor_is_named(copied: Path) -> None:
    change_tensors(copied, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(BadModelFile, match=r"model\.norm\.weight has shape \[63\], expected \[64\]"):
        opened(copied)


def test_leftover_rotation_tables_are_ignored(copied: Path) -> None:
    change_tensors(copied, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    opened(copied)


def test_a_tensor_of_whole_numbers_is_refused(copied: Path) -> None:
    change_tensors(copied, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has dtype I8"):
        opened(copied)


def test_a_tied_head_equal_to_the_embedding_is_accepted(copied: Path) -> None:
    change_tensors(copied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    opened(copied)


def test_a_tied_head_that_differs_is_refused(copied: Path) -> None:
    change_tensors(copied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(BadModelFile, match="differs from"):
        opened(copied)


def test_an_untied_model_needs_its_head(copied: Path) -> None:
    edit_json(copied / "config.json", tie_word_embeddings=False)
    with pytest.raises(BadModelFile, match=r"missing tensors: lm_head\.weight"):
        opened(copied)


def test_a_truncated_safetensors_file_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadModelFile, match=r"model\.safetensors"):
        opened(copied)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = save_llama(tmp_path, shard="40KB")
    victim = sorted(path.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(BadModelFile, match=victim.name):
        opened(path)


def test_an_index_cannot_point_outside_its_directory(copied: Path) -> None:
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(BadModelFile, match="not the name of a file in this directory"):
        opened(copied)


def test_pickled_weights_are_not_read(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(BadModelFile, match=r"pytorch_model\.bin is pickled"):
        opened(copied)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(BadModelFile, match=name):
        opened(copied)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_garbled_file_is_named(copied: Path, name: str) -> None:
    (copied / name).write_text('{"')
    with pytest.raises(BadModelFile, match=name):
        opened(copied)


def test_end_tokens_of_all_files_count(copied: Path) -> None:
    edit_json(copied / "config.json", eos_token_id=[5])
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    with open_directory(copied) as source:
        assert source.config.eos_ids == source.tokenizer.eos_ids == (5, 7, 2)


def test_a_template_file_stands_before_the_settings(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("{{ messages[0]['content'] }}>")
    with open_directory(copied) as source:
        assert source.template.split(None, [("user", "a")])[-1] == ">"


def test_the_default_of_several_templates_is_taken(copied: Path) -> None:
    templates = [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]
    edit_json(copied / "tokenizer_config.json", chat_template=templates)
    with open_directory(copied) as source:
        assert source.template.split("s", [("user", "a")])[0] == "<|im_start|>system\n"


@pytest.mark.parametrize("wanted", [True, False])
def test_the_settings_say_whether_a_begin_token_is_wanted(copied: Path, wanted: bool) -> None:
    edit_json(copied / "tokenizer_config.json", add_bos_token=wanted)
    with open_directory(copied) as source:
        assert source.tokenizer.add_bos is wanted


def test_a_post_processor_tells_that_a_begin_token_is_wanted(copied: Path) -> None:
    edit_json(copied / "tokenizer_config.json", add_bos_token=None)
    begin = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {"<|im_start|>": begin},
    }
    edit_json(copied / "tokenizer.json", post_processor=processor)
    with open_directory(copied) as source:
        assert source.tokenizer.add_bos


def test_weights_outlive_the_files(copied: Path) -> None:
    model = load_model(copied, torch.float32, CPU).model
    before = dense_logits(model, IDS)
    file = copied / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(b"\xff" * (file.stat().st_size // 2))
    assert torch.equal(dense_logits(model, IDS), before)
