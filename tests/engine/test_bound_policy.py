"""Requests with a bound, told from samples at every step."""

from __future__ import annotations

import pytest

from kvblend.engine.bound import KLModel, Shown
from kvblend.engine.evaluation.bound_policy import Outcome, follow, follow_oracle, summarise_bound
from kvblend.engine.evaluation.calibration import Sample

# the limit is twice the change
MODEL = KLModel(0.0, 1.0, 0.0, 0.0, 0.6931471805599453, 0.0, 1, floor=0.0)


def request(first: float, second: float, third: float, skipped: float = 0.0) -> list[Sample]:
    """Changes at 0.15, 0.3, 0.5 (behind 0.3 and behind 0.15); the true KL is the change."""
    shown = [
        Shown(0.15, 0.0, first, 1.0),
        Shown(0.3, 0.15, second, 1.0),
        Shown(0.5, 0.3, third, 1.0),
        Shown(0.5, 0.15, skipped, 1.0),
    ]
    return [Sample(s, s.change, s.ratio + 0.01) for s in shown]


def test_the_first_step_that_holds_is_the_last() -> None:
    assert follow(request(0.04, 0.9, 0.9), MODEL, 0.1) == Outcome(0.15, 0.04, 0.16)


def test_a_raise_pays_for_all_its_tries() -> None:
    found = follow(request(0.06, 0.04, 0.9), MODEL, 0.1)
    assert (found.ratio, found.kl) == (0.3, 0.04)
    assert found.charged == pytest.approx(0.47)


def test_a_step_that_cannot_be_enough_is_passed_over() -> None:
    found = follow(request(0.1, 0.0, 0.0, 0.03), MODEL, 0.1)
    assert (found.ratio, found.kl) == (0.5, 0.03)
    assert found.charged == pytest.approx(0.67)


def test_at_last_everything_is_computed() -> None:
    found = follow(request(9.0, 9.0, 9.0), MODEL, 0.1)
    assert (found.ratio, found.kl) == (1.0, 0.0)
    assert found.charged == pytest.approx(1.16)


def test_an_oracle_has_the_cheapest_step_that_holds_at_once() -> None:
    assert follow_oracle(request(0.2, 0.09, 0.01, 0.01), 0.1) == Outcome(0.3, 0.09, 0.31)
    assert follow_oracle(request(0.2, 0.2, 0.2, 0.2), 0.1) == Outcome(1.0, 0.0, 1.0)


def test_the_summary_counts_requests() -> None:
    given = [Outcome(0.15, 0.2, 0.16), Outcome(0.15, 0.05, 0.16), Outcome(0.3, 0.05, 0.47), Outcome(1.0, 0.0, 1.16)]
    found = summarise_bound(given, 0.1)
    assert (found.requests, found.held, found.raised, found.full) == (4, 0.75, 0.5, 0.25)
    assert found.charged == pytest.approx(0.4875)


def test_a_missing_sample_is_said() -> None:
    with pytest.raises(ValueError, match=r"there is no sample of ratio 0\.15 behind 0\.0"):
        follow([Sample(Shown(0.15, 0.05, 0.1, 1.0), 0.1)], MODEL, 0.1)
