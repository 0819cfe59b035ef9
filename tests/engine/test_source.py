"""What every loader hands over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvblend.engine.loaders.gguf import open_gguf
from kvblend.engine.loaders.hf import open_directory
from kvblend.engine.weights import expected_shapes


def test_both_formats_hand_over_equal_tensors(llama_dir: Path, llama_gguf: Path) -> None:
    with open_directory(llama_dir) as one, open_gguf(llama_gguf) as other:
        assert all(torch.equal(one.read(name), other.read(name)) for name in expected_shapes(one.config))


def test_both_formats_hand_over_equal_sizes(llama_dir: Path, llama_gguf: Path) -> None:
    with open_directory(llama_dir) as one, open_gguf(llama_gguf) as other:
        assert one.config.rms_norm_eps == pytest.approx(other.config.rms_norm_eps)
        assert (one.config.num_kv_heads, one.config.rope) == (other.config.num_kv_heads, other.config.rope)


def test_files_are_those_that_hold_the_weights(llama_dir: Path, llama_gguf: Path) -> None:
    with open_directory(llama_dir) as one, open_gguf(llama_gguf) as other:
        assert one.files == (llama_dir / "model.safetensors",)
        assert other.files == (llama_gguf,)
