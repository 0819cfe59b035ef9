"""Tensors of files under the engine's names: fused ones split, norms folded, sizes checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import save_family
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config

from kvblend.engine.config import BadModelFile
from kvblend.engine.loaders.hf import open_directory
from kvblend.engine.loaders.hf_tensors import TensorNames
from kvblend.engine.weights import expected_shapes

QKV, GATE_UP = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
CONFIG = tiny_config(num_layers=1)
HIDDEN, Q, KV, INNER = 48, 48, 16, 64


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("phi3"), "phi3")


class Whole:
    """A handle over one tensor, as safetensors' are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensor

    def get_slice(self, name: str) -> torch.Tensor:
        return self.tensor


def names(shapes: dict[str, tuple[int, ...]], **options: Any) -> TensorNames:
    return TensorNames(CONFIG, shapes, **{"fused": False, "folded_norms": False, **options})


def test_fused_tensors_take_the_names_of_their_parts() -> None:
    found = names({QKV: (Q + 2 * KV, HIDDEN), GATE_UP: (2 * INNER, HIDDEN)}, fused=True).shapes
    want = expected_shapes(CONFIG)
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert found == {name: shape for name, shape in want.items() if name.split(".")[-2] in parts}


def test_the_parts_follow_one_another_in_the_file() -> None:
    tensor = torch.arange(float(Q + 2 * KV))[:, None].expand(-1, HIDDEN)
    own = names({QKV: (Q + 2 * KV, HIDDEN)}, fused=True)
    parts = [own.read({QKV: Whole(tensor)}, f"model.layers.0.self_attn.{n}_proj.weight") for n in "qkv"]
    assert [part.shape[0] for part in parts] == [Q, KV, KV]
    assert torch.equal(torch.cat(parts), tensor)


@pytest.mark.parametrize("name", [QKV, GATE_UP])
def test_a_fused_tensor_of_the_wrong_size_is_named(phi3: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(phi3, tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    rows = tensors[name].shape[0]
    save_file(tensors, path / "model.safetensors")
    with (
        pytest.raises(BadModelFile, match=rf"{name} has shape \[{rows}, 64\], expected {rows + 1} rows"),
        open_directory(path),
    ):
        pass


def test_a_missing_part_is_named_as_the_engine_names_it(phi3: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(phi3, tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    del tensors[QKV]
    save_file(tensors, path / "model.safetensors")
    with (
        pytest.raises(BadModelFile, match=r"missing tensors: model\.layers\.0\.self_attn\.k_proj"),
        open_directory(path),
    ):
        pass


def test_fused_names_are_unexpected_in_other_families() -> None:
    assert QKV in names({QKV: (Q + 2 * KV, HIDDEN)}).shapes


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_a_folded_norm_is_one_more_in_float32(name: str) -> None:
    weight = torch.tensor([0.001, -0.5], dtype=torch.bfloat16)
    read = names({name: (2,)}, folded_norms=True).read({name: Whole(weight)}, name)
    assert read.dtype == torch.float32
    assert torch.equal(read, weight.float() + 1.0)


def test_other_tensors_are_read_as_they_are() -> None:
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    read = names({"lm_head.weight": (2, 2)}, folded_norms=True).read(
        {"lm_head.weight": Whole(weight)}, "lm_head.weight"
    )
    assert torch.equal(read, weight)
    assert read.dtype == torch.bfloat16
    assert read.data_ptr() != weight.data_ptr()
