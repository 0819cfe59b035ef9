"""A run's figures from its outcomes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest.figures import compute, details, peak_concurrency, peak_tokens, spread
from loadtest.options import read_options
from loadtest.outcome import Outcome

ONE = Outcome(
    index=0,
    behaviour="normal",
    status="ok",
    due_s=1.0,
    lag_s=0.001,
    sent_s=1.2,
    first_s=1.5,
    end_s=2.0,
    gaps_s=[0.1, 0.4],
    input_tokens=100,
    output_tokens=6,
    estimated=False,
    reuse="full_hit",
    cached_tokens=80,
    text="abc",
)


def computed(*outcomes: Outcome, line: str = "", rate: float = 2.0) -> dict[str, Any]:
    return compute(outcomes, read_options(line.split()), rate)


def test_times_count_from_when_the_request_was_due() -> None:
    result = computed(ONE)
    assert (result["mean_ttft_ms"], result["mean_e2el_ms"]) == pytest.approx((500, 1000))
    assert (result["mean_tpot_ms"], result["mean_itl_ms"]) == pytest.approx((100, 250))
    assert result["mean_client_queue_time_ms"] == pytest.approx(200)


def test_throughput_is_of_the_whole_duration() -> None:
    result = computed(ONE, replace(ONE, status="failed", end_s=4.0))
    assert result["duration"] == 4.0
    assert (result["request_throughput"], result["output_throughput"]) == (0.25, 1.5)
    assert (result["total_token_throughput"], result["total_input_tokens"]) == (26.5, 100)


def test_each_status_is_counted() -> None:
    others = [replace(ONE, status=status) for status in ("failed", "cancelled", "disconnected")]
    result = computed(ONE, *others, replace(ONE, behaviour="slow"))
    counts = [result[key] for key in ("completed", "failed", "cancelled", "disconnected", "slow_readers")]
    assert counts == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("other", [replace(ONE, status="cancelled", first_s=9.0), replace(ONE, behaviour="slow")])
def test_only_readers_that_kept_up_to_the_end_are_timed(other: Outcome) -> None:
    assert computed(ONE, replace(other, end_s=9.0))["mean_e2el_ms"] == pytest.approx(1000)


def test_times_are_split_by_what_was_reused() -> None:
    cold = replace(ONE, reuse="cold", first_s=1.9)
    reuse = computed(ONE, cold, cold)["reuse"]
    assert {kind: part["completed"] for kind, part in reuse.items()} == {
        "full_hit": 1,
        "partial_hit": 0,
        "cold": 2,
        "unknown": 0,
    }
    assert (reuse["full_hit"]["mean_ttft_ms"], reuse["cold"]["mean_ttft_ms"]) == pytest.approx((500, 900))
    assert reuse["partial_hit"]["mean_ttft_ms"] is None


@pytest.mark.parametrize(("goals", "good"), [("ttft:501 tpot:101", 0.5), ("ttft:499", 0.0), ("e2el:1001", 0.5)])
def test_goodput_counts_who_keeps_every_goal(goals: str, good: float) -> None:
    assert computed(ONE, line=f"--goodput {goals}")["request_goodput"] == good


def test_metrics_and_percentiles_are_those_asked_for() -> None:
    result = computed(ONE, line="--percentile-metrics ttft --metric-percentiles 50,99.9")
    assert {key for key in result if key.endswith("_ttft_ms")} == {
        "mean_ttft_ms",
        "median_ttft_ms",
        "std_ttft_ms",
        "p50_ttft_ms",
        "p99.9_ttft_ms",
    }
    assert "mean_e2el_ms" not in result


def test_without_a_rate_the_client_is_never_late() -> None:
    assert "mean_client_lag_ms" in computed(ONE)
    assert "mean_client_lag_ms" not in computed(ONE, rate=math.inf)


def test_nothing_completed_is_no_time() -> None:
    result = computed(replace(ONE, status="failed", first_s=None))
    assert (result["completed"], result["mean_ttft_ms"], result["p99_e2el_ms"]) == (0, None, None)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_lie_within_the_values(seconds: list[float], percentile: float) -> None:
    found = spread("x", seconds, [percentile])
    value = found[f"p{percentile:g}_x_ms"]
    assert value is not None
    assert min(seconds) * 1000 - 1e-6 <= value <= max(seconds) * 1000 + 1e-6
    assert found["median_x_ms"] == pytest.approx(float(np.median(seconds)) * 1000)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=20))
def test_the_peak_is_of_requests_open_at_once(spans: list[tuple[int, int]]) -> None:
    outcomes = [replace(ONE, sent_s=float(start), end_s=float(start + length)) for start, length in spans]
    open_at = [sum(start <= now < start + length for start, length in spans) for now in range(30)]
    assert peak_concurrency([outcome for outcome in outcomes if outcome.end_s > outcome.sent_s]) == max(open_at)


def test_peak_tokens_are_of_one_second() -> None:
    assert peak_tokens([ONE, replace(ONE, first_s=1.9, gaps_s=[0.2, 0.1])]) == 3.0


def test_details_have_one_entry_for_each_request() -> None:
    assert {len(values) for values in details([ONE, ONE]).values()} == {2}
