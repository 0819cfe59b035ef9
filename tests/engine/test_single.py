"""One row over exactly the keys it sees, its heads folded into rows, against the reference."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, assert_close, make_case
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.attention.base import first_key
from kvblend.engine.attention.single import attend_single

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def run(case: Case) -> torch.Tensor:
    kv_heads, _, dim = case.k.shape
    seen = slice(first_key(int(case.positions[0]), case.window), int(case.positions[0]) + 1)
    q = case.q.view(1, kv_heads, -1, dim)
    return attend_single(q, case.k[None, :, seen], case.v[None, :, seen], case.scale).reshape(1, -1)


@st.composite
def single_rows(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    return make_case(
        [draw(st.integers(0, 700))],
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 10, 64])),
        spare_keys=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 1 << 16)),
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        window=draw(st.one_of(st.none(), st.integers(1, 800))),
    )


@given(single_rows())
def test_any_row_equals_the_reference_in_any_dtype(case: Case) -> None:
    out = run(case)
    assert out.dtype == case.q.dtype
    assert_close(out, case.reference(), TOLERANCES[case.q.dtype])


def test_a_row_at_position_zero_sees_itself_only() -> None:
    case = make_case([0], heads=4, kv_heads=2, spare_keys=4)
    assert torch.equal(run(case), case.v[:, 0].repeat_interleave(2, 0).reshape(1, -1))


@pytest.mark.parametrize("window", [None, 6])
def test_slots_behind_the_row_or_before_its_window_do_not_matter(window: int | None) -> None:
    case = make_case([30], spare_keys=3, window=window)
    before = run(case)
    for slots in (case.k, case.v):
        slots[:, 31:] = torch.nan
        if window is not None:
            slots[:, : 30 - window + 1] = torch.nan
    assert torch.equal(run(case), before)
