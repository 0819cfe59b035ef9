"""The CPU backend against the reference, over every kind of rows and across the borders of its tiles."""

from __future__ import annotations

from dataclasses import replace

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
    dense = replace(dense, window=case.window)
    sparse = replace(dense, positions=case.positions, q=dense.q[case.positions])
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


def test_keys_outside_every_window_are_not_read() -> None:
    case = make_case([*range(40, 60), 80], window=6)
    before = case.run(SdpaBackend(8))
    case.k[:, :35], case.v[:, :35] = torch.nan, torch.nan
    assert torch.equal(case.run(SdpaBackend(8)), before)


def test_tiles_start_where_the_window_of_their_first_row_does() -> None:
    plan = SdpaBackend(2).prepare(torch.tensor([1, 4, 9, 30, 31]), CPU, torch.float32, 5)
    assert [(tile.first, tile.keys) for tile in plan.tiles] == [(0, 5), (5, 31), (27, 32)]


@pytest.mark.parametrize(("window", "causal"), [(8, False), (9, True), (100, True)])
def test_a_window_that_hides_nothing_takes_the_causal_kernel(window: int, causal: bool) -> None:
    assert SdpaBackend().prepare(torch.arange(9), CPU, torch.float32, window).causal == causal


def test_a_single_row_with_a_window_reads_its_window() -> None:
    case = make_case([30], window=4)
    (tile,) = SdpaBackend().prepare(case.positions, CPU, torch.float32, 4).tiles
    assert (tile.first, tile.keys, tile.mask) == (27, 31, None)
    assert_close(case.run(SdpaBackend()), case.reference())


def test_one_plan_serves_every_layer() -> None:
    first, second = make_case([2, 7], seed=1), make_case([2, 7], seed=2)
    backend = SdpaBackend()
    plan = backend.prepare(first.positions, CPU, torch.float32)
    for case in (first, second):
        assert_close(backend.attend(plan, case.q, case.k, case.v, case.scale), case.reference())
