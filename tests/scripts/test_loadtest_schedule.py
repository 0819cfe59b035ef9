"""When requests are due, and how a limit is shared among processes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest.schedule import arrivals, split_limit


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.floats(0.1, 50), st.integers(0, 2**32))
def test_times_rise_from_the_start(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(count, rate, burstiness, np.random.default_rng(seed))
    assert len(times) == count
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    times = arrivals(50_000, 20.0, burstiness, np.random.default_rng(1))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_rate_of_inf_is_all_at_once() -> None:
    assert arrivals(3, math.inf, 1.0, np.random.default_rng(0)).tolist() == [0, 0, 0]


def test_a_burstiness_of_inf_is_a_clock() -> None:
    assert arrivals(3, 2.0, math.inf, np.random.default_rng(0)).tolist() == [0.5, 1.0, 1.5]


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 64))
def test_a_limit_is_shared_out_whole_and_evenly(limit: int, jobs: int, processes: int) -> None:
    shares = [share for share in split_limit(limit, jobs, processes) if share is not None]
    assert sum(shares) == limit
    assert len(shares) <= min(processes, jobs)
    assert max(shares) - min(shares) <= 1
    assert min(shares) >= 1


def test_without_a_limit_no_process_has_one() -> None:
    assert split_limit(None, 10, 3) == [None, None, None]
