from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.evaluation.bootstrap import Bootstrap

VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


@given(VALUES)
def test_an_interval_lies_within_the_values(values: list[float]) -> None:
    low, high = Bootstrap(len(values), 0).mean(values)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


@given(st.floats(-100, 100), st.integers(1, 20))
def test_equal_values_have_no_spread(value: float, count: int) -> None:
    assert Bootstrap(count, 0).mean([value] * count) == pytest.approx((value, value))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30), st.floats(0.0, 2.0))
def test_a_method_that_keeps_the_same_share_everywhere_has_a_sharp_recovery(
    baseline: list[float], share: float
) -> None:
    # only paired resamples make it so: the baseline alone varies
    interval = Bootstrap(len(baseline), 1).recovery([share * x for x in baseline], baseline)
    assert interval == pytest.approx((1 - share, 1 - share))


@given(VALUES, st.floats(-10, 10))
def test_a_shift_of_all_values_shifts_the_interval(values: list[float], shift: float) -> None:
    bootstrap = Bootstrap(len(values), 2)
    low, high = bootstrap.mean(values)
    assert bootstrap.mean([x + shift for x in values]) == pytest.approx((low + shift, high + shift), abs=1e-6)


def test_the_seed_decides() -> None:
    values = [0.0, 1.0, 2.0, 5.0, 9.0]
    assert Bootstrap(5, 3).mean(values) == Bootstrap(5, 3).mean(values)
    assert Bootstrap(5, 3).mean(values) != Bootstrap(5, 4).mean(values)


def test_the_interval_is_that_of_the_normal_distribution_where_it_holds() -> None:
    values = [float(i % 2) for i in range(400)]
    low, high = Bootstrap(400, 0).mean(values)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.006)


def test_a_baseline_without_divergence_recovers_nothing() -> None:
    assert Bootstrap(2, 0).recovery([0.0, 0.0], [0.0, 0.0]) == (0.0, 0.0)


def test_another_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values for 3 questions"):
        Bootstrap(3, 0).mean([1.0, 2.0])


def test_no_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="count is 0"):
        Bootstrap(0, 0)
