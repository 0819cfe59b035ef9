"""Every architecture read from GGUF equals the Hugging Face directory it was written from; traits in fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import VARIANTS, save_family
from gguf_files import reference_from_gguf, write_gguf
from model_files import dense_logits, relative_error
from tiny_models import random_ids

from kvblend.engine.config import BadModelFile, ModelConfig, UnsupportedModel
from kvblend.engine.loaders.gguf import open_gguf
from kvblend.engine.loaders.gguf_config import ARCHITECTURES
from kvblend.engine.loaders.load import load_model
from kvblend.engine.model import Model

NAMES = ("llama linear", "llama yarn", "qwen2", "qwen2 yarn", "qwen3", "qwen3 bias", "gemma3 linear")
IDS = random_ids(150, 5, 300)

Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Directory of a variant, written once."""
    return cache(lambda name: save_family(tmp_path_factory.mktemp("family"), name))


def load(path: Path) -> Model:
    return load_model(path, torch.float32, torch.device("cpu")).model


def config_of(path: Path) -> ModelConfig:
    with open_gguf(path) as source:
        return source.config


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_the_logits_of_its_directory(saved: Saved, tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", saved(name))
    assert relative_error(dense_logits(load(path), IDS), dense_logits(load(saved(name)), IDS)) < 1e-5


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_file_gives_the_logits_of_transformers(saved: Saved, tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", saved(name))
    with torch.inference_mode():
        theirs = reference_from_gguf(path)(torch.tensor([IDS])).logits[0]
    assert relative_error(dense_logits(load(path), IDS), theirs) < 1e-4


def test_every_architecture_is_tried_here() -> None:
    assert {VARIANTS[name][0].removesuffix("_text") for name in NAMES} == set(ARCHITECTURES)


def test_gemma_without_a_pattern_sees_all_in_every_sixth_layer(saved: Saved, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"gemma3__attention__sliding_window_pattern": None}
    config = config_of(write_gguf(tmp_path / "a.gguf", saved("gemma3 linear"), **fields))
    assert (config.sliding_window, config.windowed_layers) == (24, (True, True, True))


def test_a_pattern_may_be_a_number(saved: Saved, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"gemma3__attention__sliding_window_pattern": 2}
    config = config_of(write_gguf(tmp_path / "a.gguf", saved("gemma3 linear"), **fields))
    assert config.windowed_layers == (True, False, True)


def test_local_layers_of_gemma_turn_with_their_own_base(saved: Saved, tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "a.gguf", saved("gemma3 linear"), gemma3__rope__freq_base_swa=5000.0))
    assert config.rope_local is not None
    assert (config.rope.theta, config.rope.factor, config.rope_local.theta) == (1e6, 8.0, 5000.0)


def test_a_window_of_a_llama_file_counts_for_all_layers(llama_dir: Path, tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "a.gguf", llama_dir, llama__attention__sliding_window=40))
    assert [config.windowed(layer) for layer in range(3)] == [True, True, True]


def test_the_older_spelling_of_linear_scaling(llama_dir: Path, tmp_path: Path) -> None:
    rope = config_of(write_gguf(tmp_path / "a.gguf", llama_dir, llama__rope__scale_linear=4.0)).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_capped_scores_are_refused_by_name(saved: Saved, tmp_path: Path, name: str) -> None:
    fields: dict[str, Any] = {f"gemma3__{name}": 30.0}
    path = write_gguf(tmp_path / "a.gguf", saved("gemma3 linear"), **fields)
    with pytest.raises(UnsupportedModel, match=f"gemma3.{name} is 30"):
        config_of(path)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("sliding_window_pattern", 0, "sliding_window_pattern is 0"),
        ("sliding_window_pattern", [True], "windowed_layers has 1 marks for 3 layers"),
        ("sliding_window", None, "gemma3.attention.sliding_window is missing"),
        ("sliding_window", 0, "sliding_window is 0"),
    ],
)
def test_a_bad_window_is_named(saved: Saved, tmp_path: Path, field: str, value: object, named: str) -> None:
    changes: dict[str, Any] = {f"gemma3__attention__{field}": value}
    path = write_gguf(tmp_path / "a.gguf", saved("gemma3 linear"), **changes)
    with pytest.raises(BadModelFile, match=named) as caught:
        config_of(path)
    assert str(caught.value).count("a.gguf") == 1
