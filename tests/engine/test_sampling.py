"""Sampling: what may be chosen, how often, and that a row depends on itself only."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.sampling import SamplingPlan, sample

GREEDY = SamplingPlan(0.0, 1.0, 0)
logit_rows = st.lists(st.floats(-20.0, 20.0, width=32), min_size=1, max_size=24)


def draw_many(
    logits: torch.Tensor, temperature: float, top_p: float, count: int, top_k: int = 0, min_p: float = 0.0
) -> torch.Tensor:
    plans = [SamplingPlan(temperature, top_p, 11, top_k=top_k, min_p=min_p)] * count
    return torch.tensor(sample(logits.expand(count, -1), plans, range(count))).bincount(minlength=logits.shape[0])


def test_temperature_zero_takes_the_largest() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]]), [GREEDY] * 2, [0, 0]) == [1, 0]


def test_greedy_ties_fall_to_the_lowest_id() -> None:
    assert sample(torch.tensor([[0.0, 5.0, 5.0, 5.0]]), [GREEDY], [0]) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    count = 4000
    expected = (logits / temperature).softmax(0) * count
    chi_square = float(((draw_many(logits, temperature, 1.0, count) - expected).square() / expected).sum())
    assert chi_square < 18.5  # 0.1 % point of 4 degrees of freedom


def test_a_nucleus_is_drawn_from_in_proportion() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.1, 0.3])
    seen = draw_many(probabilities.log(), 1.0, 0.75, 4000)
    assert seen[0] == seen[2] == 0
    assert abs(int(seen[1]) / 4000 - 0.5 / 0.8) < 0.03


def test_top_p_reached_exactly_takes_nothing_more() -> None:
    seen = draw_many(torch.tensor([0.25, 0.5, 0.25]).log(), 1.0, 0.5, 200)
    assert seen.tolist() == [0, 200, 0]


def test_equal_tokens_at_the_edge_are_kept_from_the_lowest_id() -> None:
    seen = draw_many(torch.zeros(600), 1.0, 2.5 / 600, 300)
    assert seen[:3].min() > 0
    assert int(seen.sum()) == int(seen[:3].sum())


def test_a_nucleus_wider_than_the_first_candidates_is_whole() -> None:
    logits = torch.linspace(0.01, 0.0, 300)
    kept = int((logits.softmax(0).cumsum(0) < 0.9).sum()) + 1
    seen = draw_many(logits, 1.0, 0.9, 4000)
    assert int(seen[:kept].min()) > 0
    assert int(seen[kept:].sum()) == 0


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert draw_many(torch.tensor([0.0, 0.1, 0.05]), 5.0, 1e-12, 50).tolist() == [0, 50, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert sample(torch.tensor([[1.0, 9.0, 3.0]]), [SamplingPlan(temperature, 1.0, 4)], [0]) == [1]


def may_be_drawn(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition: temperature, then top_k, then top_p of what is left, then min_p."""
    mass = (logits.double() / temperature).softmax(0).tolist()
    ids = sorted(range(len(mass)), key=lambda i: (-mass[i], i))
    ids = ids[:top_k] if top_k else ids
    whole, kept, total = sum(mass[i] for i in ids), [], 0.0
    for i in ids:
        kept.append(i)
        total += mass[i] / whole
        if total >= top_p:
            break
    return {i for i in kept if mass[i] >= min_p * max(mass)}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.3), (4, 0.7, 0.0), (3, 1.0, 0.5), (5, 0.9, 0.2)],
)
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_exactly_what_the_definitions_leave_is_drawn(
    top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = torch.tensor([0.1, 2.0, 1.4, -0.5, 1.7, 0.9, -1.0])
    seen = draw_many(logits, temperature, top_p, 1500, top_k, min_p)
    assert set(seen.nonzero().flatten().tolist()) == may_be_drawn(logits, temperature, top_k, top_p, min_p)


def test_what_is_left_is_drawn_in_proportion() -> None:
    seen = draw_many(torch.tensor([0.1, 0.5, 0.1, 0.3]).log(), 1.0, 1.0, 4000, top_k=2)
    assert abs(int(seen[1]) / 4000 - 0.5 / 0.8) < 0.03


@given(logit_rows, st.floats(0.05, 3.0), st.integers(0, 1 << 40))
def test_one_candidate_is_the_greedy_choice(row: list[float], temperature: float, seed: int) -> None:
    logits = torch.tensor([row])
    plans = [SamplingPlan(temperature, 1.0, seed, top_k=1), SamplingPlan(temperature, 1.0, seed, min_p=1.0)]
    first, second = sample(logits.expand(2, -1), plans, [3, 3])
    assert first == sample(logits, [GREEDY], [0])[0]
    assert row[second] == max(row)


@given(logit_rows, st.integers(0, 1 << 40))
def test_more_candidates_than_tokens_change_nothing(row: list[float], seed: int) -> None:
    plans = [SamplingPlan(1.0, 0.8, seed), SamplingPlan(1.0, 0.8, seed, top_k=len(row))]
    assert len(set(sample(torch.tensor([row, row]), plans, [5, 5]))) == 1


class Forbid:
    """An adjustment that leaves one token out."""

    def __init__(self, token: int) -> None:
        self.token = token

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        out = logits.clone()
        out[self.token] = -math.inf
        return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_past_of_a_row_counts_for_this_row_only(temperature: float) -> None:
    plan = SamplingPlan(temperature, 1.0, 1, top_k=1)
    logits = torch.tensor([[0.0, 5.0, 4.0]] * 3)
    assert sample(logits, [plan] * 3, [0] * 3, [None, Forbid(1), None]) == [1, 2, 1]


def test_masked_tokens_are_never_drawn() -> None:
    assert draw_many(torch.tensor([-math.inf, 0.0, -math.inf]), 3.0, 1.0, 100).tolist() == [0, 100, 0]


@given(logit_rows, st.floats(0.05, 3.0), st.floats(0.01, 1.0), st.integers(0, 1 << 63), st.integers(0, 1 << 20))
def test_a_draw_lies_in_the_smallest_set_that_reaches_top_p(
    row: list[float], temperature: float, top_p: float, seed: int, position: int
) -> None:
    logits = torch.tensor([row])
    chosen = sample(logits, [SamplingPlan(temperature, top_p, seed)], [position])[0]
    mass = (logits[0].double() / temperature).softmax(0)
    likelier = float(mass[mass > mass[chosen]].sum())
    assert likelier < top_p + 1e-9


@given(logit_rows, st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.integers(0, 4), st.floats(0.1, 1.0))
def test_a_row_does_not_depend_on_the_rows_beside_it(
    row: list[float], seed: int, position: int, before: int, top_p: float
) -> None:
    plan = SamplingPlan(0.9, top_p, seed)
    alone = sample(torch.tensor([row]), [plan], [position])[0]
    others = torch.randn((before, len(row)), generator=torch.Generator().manual_seed(1))
    batch = torch.cat((others, torch.tensor([row])))
    plans = [SamplingPlan(1.5, 1.0, 5)] * before + [plan]
    assert sample(batch, plans, [7] * before + [position])[-1] == alone


def test_the_next_position_has_noise_of_its_own() -> None:
    logits = torch.zeros((40, 1000))
    assert len(set(sample(logits, [SamplingPlan(1.0, 1.0, 3)] * 40, range(40)))) > 30


def test_seeds_and_positions_are_not_interchangeable() -> None:
    logits = torch.zeros((20, 100_000))
    one = sample(logits, [SamplingPlan(1.0, 1.0, 0)] * 20, range(20))
    other = sample(logits, [SamplingPlan(1.0, 1.0, seed) for seed in range(20)], [0] * 20)
    assert len(set(one) & set(other)) == 1  # seed 0 at position 0 stands in both


def test_nan_logits_are_refused_by_row() -> None:
    logits = torch.zeros((3, 4))
    logits[1, 2] = math.nan
    with pytest.raises(ValueError, match="row 1 are NaN"):
        sample(logits, [GREEDY] * 3, [0] * 3)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_logits_without_a_finite_largest_value_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="row 0 have"):
        sample(torch.full((1, 4), value), [GREEDY], [0])


def test_counts_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 plans and 2 positions"):
        sample(torch.zeros((2, 3)), [GREEDY], [0, 0])


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -0.1])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        SamplingPlan(temperature, 1.0, 0)


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1.01, math.nan])
def test_a_top_p_out_of_range_is_refused(top_p: float) -> None:
    with pytest.raises(ValueError, match="top_p is"):
        SamplingPlan(1.0, top_p, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("min_tokens", -1),
        ("logprobs", 21),
    ],
)
def test_any_other_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        SamplingPlan(1.0, 1.0, 0, **{name: value})  # type: ignore[arg-type]
