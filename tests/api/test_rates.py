from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.actors.errors import RequestError
from kvblend.api.server.rates import Allowance, RateLimits


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_minutes_worth_may_come_at_once_and_no_more() -> None:
    allowance = Allowance(RateLimits(3), Clock())
    for _ in range(3):
        allowance.count()
    with pytest.raises(RequestError, match="3 requests per minute") as caught:
        allowance.count()
    assert caught.value.status == 429
    assert caught.value.retry_after_s == pytest.approx(20.0)


def test_a_request_is_taken_when_the_wait_that_was_told_is_over() -> None:
    clock = Clock()
    allowance = Allowance(RateLimits(7), clock)
    for _ in range(7):
        allowance.count()
    with pytest.raises(RequestError) as caught:
        allowance.count()
    assert caught.value.retry_after_s is not None
    clock.now_s += caught.value.retry_after_s
    allowance.count()
    with pytest.raises(RequestError):
        allowance.count()


def test_idle_hours_are_not_saved_up() -> None:
    clock = Clock()
    allowance = Allowance(RateLimits(2), clock)
    clock.now_s += 7200.0
    allowance.count()
    allowance.count()
    with pytest.raises(RequestError):
        allowance.count()


def test_one_too_many_at_once_waits_for_an_end() -> None:
    allowance = Allowance(RateLimits(0, 2))
    allowance.enter()
    allowance.enter()
    with pytest.raises(RequestError, match="2 requests run at once") as caught:
        allowance.enter()
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    allowance.leave()
    allowance.enter()


def test_zero_is_no_limit() -> None:
    allowance = Allowance(RateLimits())
    for _ in range(10_000):
        allowance.count()
        allowance.enter()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 50), st.lists(st.floats(0.0, 10.0), max_size=120))
def test_no_minute_has_more_than_twice_the_limit(limit: int, gaps_s: list[float]) -> None:
    clock = Clock()
    allowance, taken_s = Allowance(RateLimits(limit), clock), list[float]()
    for gap_s in gaps_s:
        clock.now_s += gap_s
        try:
            allowance.count()
        except RequestError:
            continue
        taken_s.append(clock.now_s)
    for at_s in taken_s:
        assert sum(at_s <= other_s < at_s + 60.0 for other_s in taken_s) <= 2 * limit
