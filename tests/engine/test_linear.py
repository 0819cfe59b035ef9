"""The linear layer for few rows: the same numbers as torch's, on both sides of every limit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvblend.engine.linear import BLOCK_OUTPUTS, ROWS_LEFT, ROWS_MAX, linear

WIDE = 2 * BLOCK_OUTPUTS


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("outputs", [WIDE - 1, WIDE, WIDE + 3, WIDE + BLOCK_OUTPUTS])
@pytest.mark.parametrize("rows", [0, 1, 2, ROWS_LEFT, ROWS_LEFT + 1, ROWS_MAX, ROWS_MAX + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_it_equals_torchs_own(rows: int, outputs: int, biased: bool) -> None:
    x, weight, bias = drawn(rows, 24), drawn(outputs, 24), drawn(outputs) if biased else None
    out = linear(x, weight, bias)
    assert out.is_contiguous()
    torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=0, atol=2e-5)


def test_rows_that_lie_apart_in_memory_are_read_rightly() -> None:
    wide, weight = drawn(8, 48), drawn(WIDE, 24)
    for rows in (3, 8):
        x = wide[:rows, 5:29]
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 8])
def test_other_dtypes_keep_theirs(dtype: torch.dtype, rows: int) -> None:
    x, weight = drawn(rows, 24).to(dtype), drawn(WIDE, 24).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
