"""The tensors of a Hugging Face file as the engine names them: fused projections split, "1 + w" norms folded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvblend.engine.config import BadModelFile, ModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start..end-1` of the tensor `name` of a file."""

    name: str
    start: int
    end: int


class TensorNames:
    """Where the engine's tensors lie among a file's: `shapes` by engine name, `read` for their values."""

    def __init__(
        self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], *, fused: bool, folded_norms: bool
    ) -> None:
        """`shapes` by file name. Raises BadModelFile for a fused tensor of the wrong size."""
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        f = config.intermediate_size
        self._folded = folded_norms
        self._parts: dict[str, Rows] = {}
        self.shapes = dict(shapes)
        if not fused:
            return
        splits = {
            "self_attn.qkv_proj.weight": (("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
            "mlp.gate_up_proj.weight": (("gate_proj", f), ("up_proj", f)),
        }
        for name, shape in shapes.items():
            for ending, parts in splits.items():
                if name.endswith(ending):
                    self._split(name, shape, parts)

    def _split(self, name: str, shape: tuple[int, ...], parts: tuple[tuple[str, int], ...]) -> None:
        rows = sum(count for _, count in parts)
        if len(shape) != 2 or shape[0] != rows:
            raise BadModelFile(f"{name} has shape {list(shape)}, expected {rows} rows")
        del self.shapes[name]
        block, start = name.removesuffix(".weight").rpartition(".")[0], 0
        for part, count in parts:
            self.shapes[f"{block}.{part}.weight"] = (count, shape[1])
            self._parts[f"{block}.{part}.weight"] = Rows(name, start, start + count)
            start += count

    def read(self, handles: Mapping[str, Any], name: str) -> torch.Tensor:
        """One tensor by engine name, from the open safetensors files that `handles` gives by file name."""
        part = self._parts.get(name)
        if part is not None:
            values: torch.Tensor = handles[part.name].get_slice(part.name)[part.start : part.end]
        else:
            values = handles[name].get_tensor(name)
        if self._folded and name.endswith("norm.weight"):
            # in float32 at least: a narrow dtype would round the sum
            return values.to(torch.promote_types(values.dtype, torch.float32)) + 1.0
        # the library's tensors are windows into the file: ours must outlive it
        return values.clone()
