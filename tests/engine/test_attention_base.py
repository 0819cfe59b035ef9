"""The reference itself, scored attention, and the mask mistake that must not come back."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import Case, assert_close, attention_cases, make_case
from hypothesis import given

from kvblend.engine.attention.base import attend_scored, reference_attention


def attend_by_hand(case: Case, row: int, head: int) -> list[float]:
    """One row and head in plain Python."""
    kv_head = head * case.k.shape[0] // case.q.shape[1]
    position = int(case.positions[row])
    seen = [j for j in range(position + 1) if case.window is None or position - case.window < j]
    query = case.q[row, head].tolist()
    keys, values = case.k[kv_head].tolist(), case.v[kv_head].tolist()
    weights = [math.exp(case.scale * math.fsum(a * b for a, b in zip(query, keys[j], strict=True))) for j in seen]
    total = math.fsum(weights)
    return [math.fsum(w * values[j][d] for w, j in zip(weights, seen, strict=True)) / total for d in range(len(query))]


@pytest.mark.parametrize("window", [None, 1, 4, 9, 10])
def test_the_reference_equals_sums_by_hand(window: int | None) -> None:
    case = make_case([0, 3, 4, 9], heads=4, kv_heads=2, head_dim=6, spare_keys=3, window=window)
    out = case.reference().view(4, 4, 6)
    for row in range(4):
        for head in range(4):
            assert out[row, head].tolist() == pytest.approx(attend_by_hand(case, row, head), abs=1e-12)


def test_the_reference_is_float64() -> None:
    assert make_case([1, 2], dtype=torch.bfloat16).reference().dtype == torch.float64


def test_sparse_rows_equal_the_same_rows_of_a_dense_causal_pass() -> None:
    dense = make_case(list(range(40)))
    chosen = torch.tensor([0, 2, 3, 17, 30, 39])
    sparse = reference_attention(chosen, dense.q[chosen], dense.k, dense.v, dense.scale)
    assert torch.allclose(sparse, dense.reference()[chosen], rtol=0, atol=1e-12)


def attend_bottom_right(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The known mistake: as if the rows were the last ones. Returns the output and the mask `[rows, keys]`."""
    rows, keys = len(case.positions), case.k.shape[1]
    mask = torch.ones(rows, keys).tril(keys - rows).bool()
    group = case.q.shape[1] // case.k.shape[0]
    k, v = (t.double().repeat_interleave(group, 0) for t in (case.k, case.v))
    out = torch.nn.functional.scaled_dot_product_attention(
        case.q.double().transpose(0, 1), k, v, attn_mask=mask, scale=case.scale
    )
    return out.transpose(0, 1).reshape(rows, -1), mask


def test_a_bottom_right_mask_on_gappy_rows_sees_the_future_and_differs() -> None:
    case = make_case([3, 8, 9, 20, 31, 40])
    out, mask = attend_bottom_right(case)
    future = mask & (torch.arange(case.k.shape[1])[None, :] > case.positions[:, None])
    assert future[:-1].any(1).all()
    assert (out - case.reference()).abs().max() > 0.1


def test_a_bottom_right_mask_is_right_for_the_last_rows_only() -> None:
    case = make_case(list(range(10, 24)))
    assert torch.allclose(attend_bottom_right(case)[0], case.reference(), rtol=0, atol=1e-12)


@given(attention_cases())
def test_scored_attention_gives_the_reference_output(case: Case) -> None:
    out, _ = attend_scored(case.positions, case.q, case.k, case.v, case.scale, case.window)
    assert_close(out, case.reference())


@given(attention_cases())
def test_keys_that_no_row_sees_receive_nothing(case: Case) -> None:
    _, scores = attend_scored(case.positions, case.q, case.k, case.v, case.scale, case.window)
    rows, keys = case.positions[:, None], torch.arange(case.k.shape[1])[None, :]
    seen = ((keys <= rows) & (keys > rows - (case.window or 1 << 20))).any(0)
    assert torch.equal(scores > 0, seen)


def test_each_row_spends_a_weight_of_one_within_its_window() -> None:
    case = make_case([5, 9, 20], heads=2, kv_heads=1, window=3)
    case.v[:] = 0.0
    case.v[..., 0] = 1.0
    _, scores = attend_scored(case.positions, case.q, case.k, case.v, case.scale, case.window)
    assert scores.nonzero().flatten().tolist() == [3, 4, 5, 7, 8, 9, 18, 19, 20]
    assert float(scores.sum()) == pytest.approx(6.0)


def test_a_score_is_the_attention_received_times_the_mean_norm_of_v() -> None:
    case = make_case([2, 6], heads=2, kv_heads=2, head_dim=4, spare_keys=1)
    _, scores = attend_scored(case.positions, case.q, case.k, case.v, case.scale)
    wanted = torch.zeros(8)
    for row, position in enumerate(case.positions.tolist()):
        for head in range(2):
            logits = (case.k[head, : position + 1] @ case.q[row, head]) * case.scale
            wanted[: position + 1] += logits.softmax(0)
    wanted *= case.v.norm(dim=-1).mean(0)
    assert torch.allclose(scores, wanted, rtol=1e-5, atol=1e-6)


def test_keys_behind_the_last_row_receive_nothing() -> None:
    case = make_case([1, 4], spare_keys=3)
    _, scores = attend_scored(case.positions, case.q, case.k, case.v, case.scale)
    assert scores[5:].tolist() == [0.0, 0.0, 0.0]
