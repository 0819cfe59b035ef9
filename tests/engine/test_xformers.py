"""The xformers backend on a CPU: a stand-in checks what the kernel demands; masks are xformers' own, materialised."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_close, attention_cases, make_case, row_positions
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.attention.xformers import (
    GROUP_ROWS,
    XformersBackend,
    build_bias,
    probe_xformers,
    repeat_rows,
)

CPU = torch.device("cpu")


def attend_like_the_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Dense attention for `[B, M, H, K]`, refusing what the cutlass operator refuses."""
    batch, rows, heads, dim = query.shape
    keys = key.shape[1]
    assert key.shape == value.shape == (batch, keys, heads, dim)
    assert query.dtype == key.dtype == value.dtype == attn_bias.dtype
    assert type(attn_bias) is torch.Tensor
    assert attn_bias.shape == (batch, heads, rows, keys)
    assert all(stride % 8 == 0 for stride in attn_bias.stride()[:-1]), attn_bias.stride()
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value, attn_bias))
    assert all(tensor.storage_offset() % 8 == 0 for tensor in (attn_bias, key, value))
    scores = torch.einsum("bmhk,bnhk->bhmn", query, key).float() * scale + attn_bias.float()
    return torch.einsum("bhmn,bnhk->bmhk", scores.softmax(-1).to(value.dtype), value).contiguous()


def backend(group_rows: int = GROUP_ROWS) -> XformersBackend:
    return XformersBackend(attend_like_the_kernel, group_rows)


@given(attention_cases(), st.sampled_from([1, 3, 16, GROUP_ROWS]))
def test_any_rows_equal_the_reference(case: Case, group_rows: int) -> None:
    assert_close(case.run(backend(group_rows)), case.reference())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_bring_a_bias_of_their_own_dtype(dtype: torch.dtype) -> None:
    case = make_case([1, 2, 9, 20, 21, 22], dtype=dtype)
    assert_close(case.run(backend(4)), case.reference(), 3e-2)


@pytest.mark.parametrize("rows", [GROUP_ROWS, GROUP_ROWS + 1])
def test_rows_across_a_group_border(rows: int) -> None:
    case = make_case(list(range(1, 1 + 2 * rows, 2)), heads=2, kv_heads=1)
    assert_close(case.run(backend()), case.reference())


def test_keys_outside_every_window_are_not_read() -> None:
    case = make_case([*range(40, 60), 80], window=6)
    before = case.run(backend(8))
    case.k[:, :32], case.v[:, :32] = torch.nan, torch.nan
    assert torch.equal(case.run(backend(8)), before)


def test_keys_after_a_row_do_not_matter() -> None:
    case = make_case([1, 5, 6], spare_keys=3)
    before = case.run(backend(2))
    case.k[:, 7:], case.v[:, 7:] = torch.nan, torch.nan
    assert torch.equal(case.run(backend(2)), before)


@given(row_positions(), st.integers(0, 9), st.integers(1, 4), st.none() | st.integers(1, 130))
def test_the_bias_is_the_mask_by_positions_with_aligned_rows(
    positions: list[int], spare: int, times: int, window: int | None
) -> None:
    keys, rows = positions[-1] + 1 + spare, torch.tensor(positions)[:, None]
    bias = repeat_rows(build_bias(torch.tensor(positions), keys, CPU, torch.float32, 0, window), times)
    visible = torch.arange(keys)[None, :] <= rows
    if window is not None:
        visible &= rows - window < torch.arange(keys)[None, :]
    assert torch.equal(bias == 0, visible.repeat(times, 1))
    assert torch.equal(bias == -torch.inf, ~visible.repeat(times, 1))
    assert bias.stride(0) % 8 == 0


def runs_of(positions: list[int]) -> list[tuple[int, int]]:
    """`(first, one past the last)` of every run of neighbours."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


@given(row_positions())
def test_xformers_own_mask_for_runs_of_rows_is_the_mask_by_positions(positions: list[int]) -> None:
    masks: Any = pytest.importorskip("xformers.ops.fmha.attn_bias")
    runs, keys = runs_of(positions), positions[-1] + 1
    mask = masks.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        q_seqlen=[end - start for start, end in runs],
        kv_seqstarts=[0] * len(runs) + [keys],
        kv_seqlen=[end for _, end in runs],
    )
    shown = mask.materialize((len(positions), keys))
    assert torch.equal(shown, build_bias(torch.tensor(positions), keys, CPU, torch.float32))


def test_our_call_passes_xformers_own_check_of_shapes() -> None:
    common: Any = pytest.importorskip("xformers.ops.fmha.common")
    seen: list[Any] = []

    def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        inputs = common.Inputs(query=q, key=k, value=v, **given)
        inputs.validate_inputs()
        seen.append(inputs)
        return attend_like_the_kernel(q, k, v, **given)

    case = make_case([0, 4, 5, 17], heads=6, kv_heads=2)
    assert_close(case.run(XformersBackend(check, group_rows=3)), case.reference())
    assert len(seen) == 2


def test_a_probe_on_a_cpu_says_why_it_refuses() -> None:
    assert probe_xformers(CPU, torch.float32) == (None, "xformers has no operator for device 'cpu'")


def test_a_probe_reports_the_first_line_of_what_the_library_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise OSError(f"{name}: libcudart.so.12 is missing\nand more")

    monkeypatch.setattr(importlib, "import_module", fail)
    found, why = probe_xformers(torch.device("cuda"), torch.float32)
    assert found is None
    assert why == "xformers refuses: xformers.ops: libcudart.so.12 is missing"
