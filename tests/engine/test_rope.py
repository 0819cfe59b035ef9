"""Rotation: by position, relative, the same through every entrance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_config

from kvblend.engine.config import RopeConfig
from kvblend.engine.rope import RopeTable, rotate, rotate_into

CPU = torch.device("cpu")
TABLE = RopeTable(tiny_config(), torch.float64, CPU)
ROWS = torch.randn(2, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def at(row: torch.Tensor, position: int) -> torch.Tensor:
    cos, sin = TABLE.gather(torch.tensor([position]))
    return rotate(row[None], cos, sin)[0]


def test_position_zero_changes_nothing() -> None:
    assert torch.equal(at(ROWS[0], 0), ROWS[0])


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255))
def test_scores_depend_on_distance_only(query: int, key: int, shift: int) -> None:
    before = at(ROWS[0], query) @ at(ROWS[1], key)
    after = at(ROWS[0], query + shift) @ at(ROWS[1], key + shift)
    assert float(before - after) == pytest.approx(0.0, abs=1e-5)


def test_rotation_equals_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    table = RopeTable(tiny_config(), torch.float32, CPU)
    angles = torch.outer(torch.arange(40.0), torch.tensor(RopeConfig().inverse_frequencies(8)))
    cos, sin = (torch.cat((f(angles), f(angles)), dim=1)[None] for f in (torch.cos, torch.sin))
    x = torch.randn(1, 3, 40, 8, generator=torch.Generator().manual_seed(4))
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin)
    assert torch.allclose(rotate(x, *table.span(0, 40)), theirs, atol=1e-5)


def test_a_span_equals_the_gathered_positions() -> None:
    for one, other in zip(TABLE.span(5, 9), TABLE.gather(torch.arange(5, 9)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotating_into_a_buffer_equals_rotating(dtype: torch.dtype) -> None:
    cos, sin = TABLE.gather(torch.tensor([3, 11]))
    x = ROWS.to(dtype)
    out = torch.empty_like(x)
    rotate_into(out, x, cos, sin)
    assert torch.allclose(out.double(), rotate(x, cos, sin).double(), atol=1e-12)


def test_narrow_rows_are_rotated_in_float32() -> None:
    table = RopeTable(tiny_config(), torch.bfloat16, CPU)
    cos, sin = table.gather(torch.tensor([200, 201]))
    assert cos.dtype == torch.float32
    wide = rotate(ROWS.to(torch.bfloat16).float(), cos, sin).to(torch.bfloat16)
    assert torch.equal(rotate(ROWS.to(torch.bfloat16), cos, sin), wide)
