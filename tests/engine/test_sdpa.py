"""The CPU backend against the reference, over every kind of rows and across the borders of its tiles."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, assert_close, attention_cases, make_case
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.attention.sdpa import TILE_ROWS_DENSE, TILE_ROWS_SCATTERED, SdpaBackend

CPU = torch.device("cpu")


@given(attention_cases(), st.sampled_from([None, 1, 3, 16]))
def test_any_rows_equal_the_reference(case: Case, tile_rows: int | None) -> None:
    assert_close(case.run(SdpaBackend(tile_rows)), case.reference())


@given(attention_cases(torch.float64))
def test_float64_is_exact_to_rounding(case: Case) -> None:
    assert_close(case.run(SdpaBackend(16)), case.reference(), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_within_their_rounding(dtype: torch.dtype) -> None:
    case = make_case([*range(3, 30, 2), *range(40, 60)], dtype=dtype)
    out = case.run(SdpaBackend(16))
    assert out.dtype == dtype
    assert_close(out, case.reference(), 2e-2)


@pytest.mark.parametrize("rows", [TILE_ROWS_SCATTERED - 1, TILE_ROWS_SCATTERED, TILE_ROWS_SCATTERED + 1])
def test_scattered_rows_across_a_tile_border(rows: int) -> None:
    case = make_case(list(range(2, 2 + 3 * rows, 3)))
    assert_close(case.run(SdpaBackend()), case.reference())


@pytest.mark.parametrize("rows", [TILE_ROWS_DENSE, TILE_ROWS_DENSE + 1])
def test_neighbouring_rows_across_a_tile_border(rows: int) -> None:
    case = make_case(list(range(5, 5 + rows)), heads=2, kv_heads=1)
    assert_close(case.run(SdpaBackend()), case.reference())


@given(attention_cases(), st.integers(0, 3))
def test_sparse_rows_equal_the_same_rows_of_a_dense_causal_pass(case: Case, offset: int) -> None:
    rows = case.k.shape[1]
    dense = make_case(list(range(rows)), case.q.shape[1], case.k.shape[0], case.q.shape[2], seed=offset)
    sparse = Case(case.positions, dense.q[case.positions], dense.k, dense.v, dense.scale)
    assert_close(sparse.run(SdpaBackend(16)), dense.run(SdpaBackend())[case.positions].double())


def test_a_row_at_position_zero_sees_itself_only() -> None:
    case = make_case([0], heads=2, kv_heads=2, spare_keys=4)
    assert torch.equal(case.run(SdpaBackend()), case.v[:, 0].reshape(1, -1))


def test_keys_after_a_row_do_not_matter() -> None:
    case = make_case([1, 5, 6], spare_keys=3)
    before = case.run(SdpaBackend(2))
    case.k[:, 7:], case.v[:, 7:] = torch.nan, torch.nan
    assert torch.equal(case.run(SdpaBackend(2)), before)


def test_rows_from_zero_take_the_causal_kernel() -> None:
    assert SdpaBackend().prepare(torch.arange(9), CPU, torch.float32).causal


def test_tiles_end_their_keys_at_their_last_row() -> None:
    plan = SdpaBackend(2).prepare(torch.tensor([1, 4, 9, 30, 31]), CPU, torch.float32)
    assert [(tile.start, tile.end, tile.keys) for tile in plan.tiles] == [(0, 2, 5), (2, 4, 31), (4, 5, 32)]


def test_one_plan_serves_every_layer() -> None:
    first, second = make_case([2, 7], seed=1), make_case([2, 7], seed=2)
    backend = SdpaBackend()
    plan = backend.prepare(first.positions, CPU, torch.float32)
    for case in (first, second):
        assert_close(backend.attend(plan, case.q, case.k, case.v, case.scale), case.reference())
