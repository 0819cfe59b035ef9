"""The fingerprint: equal for the same arithmetic, different for any other."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import edit_json
from tiny_models import tiny_config

from kvblend.engine.config import ModelConfig, RopeConfig
from kvblend.engine.fingerprint import model_fingerprint
from kvblend.engine.loaders.load import load_model

CPU = torch.device("cpu")
CONFIG = tiny_config()
BASE = model_fingerprint(CONFIG, [b"weights"], b"tokenizer")


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> str:
    return load_model(path, dtype, CPU).fingerprint


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture
def copied(llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_dir, tmp_path / "model"))


def test_it_is_64_hexadecimal_digits() -> None:
    assert len(bytes.fromhex(BASE)) == 32


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, rope=RopeConfig(theta=10000.0 + 2**-30)),
        replace(CONFIG, rope=RopeConfig(kind="llama3", factor=8.0)),
        replace(CONFIG, rope=RopeConfig(kind="llama3", freq_factors=(1.0, 1.0, 1.0, 2.0))),
        replace(CONFIG, rms_norm_eps=2e-5),
        replace(CONFIG, num_heads=3, head_dim=16, num_kv_heads=1),
        replace(CONFIG, rope=RopeConfig(kind="yarn", factor=8.0)),
        replace(CONFIG, rope=RopeConfig(rotary_fraction=0.5)),
        replace(CONFIG, sliding_window=8),
        replace(CONFIG, rope_local=RopeConfig(100.0)),
        replace(CONFIG, activation="gelu_tanh"),
        replace(CONFIG, qk_norm=True),
        replace(CONFIG, post_norms=True),
        replace(CONFIG, embedding_scale=2.0),
        replace(CONFIG, query_scale=0.5),
        replace(CONFIG, output_bias=True),
    ],
)
def test_other_arithmetic_is_another_model(config: ModelConfig) -> None:
    assert model_fingerprint(config, [b"weights"], b"tokenizer") != BASE


@pytest.mark.parametrize(
    ("weights", "tokenizer"),
    [([b"weighty"], b"tokenizer"), ([b"wei", b"ghts"], b"tokenizer"), ([b"weights"], b"tokenizes")],
)
def test_other_bytes_are_another_model(weights: list[bytes], tokenizer: bytes) -> None:
    assert model_fingerprint(CONFIG, weights, tokenizer) != BASE


def test_every_field_of_a_rope_counts() -> None:
    changes: dict[str, Any] = {
        **dict.fromkeys(("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), 3.5),
        **dict.fromkeys(("rotary_fraction", "attention_factor", "mscale", "mscale_all_dim"), 0.5),
        **dict.fromkeys(("freq_factors", "short_factors", "long_factors"), (1.0,) * 4),
        "kind": "linear",
        "original_context": 9,
        "truncate": False,
    }
    assert set(changes) == {field.name for field in fields(RopeConfig)}
    prints = {
        model_fingerprint(replace(CONFIG, rope=replace(RopeConfig(), **{name: value})), [b"w"], b"t")
        for name, value in changes.items()
    }
    assert len(prints) == len(changes)


def test_which_layers_are_windowed_counts() -> None:
    marks = [(True, False, True, False), (False, True, False, True), ()]
    configs = [replace(CONFIG, sliding_window=8, windowed_layers=mark) for mark in marks]
    assert len({model_fingerprint(config, [b"w"], b"t") for config in configs}) == 3


def test_what_does_not_change_kv_does_not_count() -> None:
    other = replace(CONFIG, context_length=1024, eos_ids=(4,), bos_id=3)
    assert model_fingerprint(other, [b"weights"], b"tokenizer") == BASE


def test_the_dtype_does_not_count(llama_dir: Path) -> None:
    assert loaded(llama_dir) == loaded(llama_dir, torch.bfloat16)


def test_one_flipped_bit_of_the_weights_counts(copied: Path) -> None:
    before = loaded(copied)
    flip(copied / "model.safetensors", -1)
    assert loaded(copied) != before


def test_one_changed_merge_of_the_tokenizer_counts(copied: Path) -> None:
    before = loaded(copied)
    text = (copied / "tokenizer.json").read_text()
    (copied / "tokenizer.json").write_text(text.replace('"special":true', '"special":false', 1))
    assert loaded(copied) != before


def test_the_rope_of_the_configuration_counts(copied: Path) -> None:
    before = loaded(copied)
    edit_json(copied / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 10001.0})
    assert loaded(copied) != before


def test_one_flipped_bit_of_a_gguf_counts(llama_gguf: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(llama_gguf, tmp_path / "a.gguf"))
    before = loaded(path)
    flip(path, -1)
    assert loaded(path) != before


def test_another_chat_template_is_the_same_model(copied: Path) -> None:
    # what a template changes are the token ids, and those are in a chunk's key themselves
    before = loaded(copied)
    (copied / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert loaded(copied) == before
