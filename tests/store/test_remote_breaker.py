from __future__ import annotations

import pytest

from kvblend.store.remote_breaker import FAILURES_MAX, PAUSE_MAX_S, PAUSE_MIN_S, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def trip(breaker: Breaker) -> list[bool]:
    return [breaker.fail() for _ in range(FAILURES_MAX)]


def test_calls_go_while_all_is_well(breaker: Breaker) -> None:
    assert breaker.admit()
    assert not breaker.succeed()
    assert breaker.admit()


def test_failures_in_a_row_open_it_and_only_the_last_one_says_so(breaker: Breaker) -> None:
    assert trip(breaker) == [False] * (FAILURES_MAX - 1) + [True]
    assert not breaker.admit()


def test_a_success_between_failures_starts_the_count_anew(breaker: Breaker) -> None:
    breaker.fail()
    breaker.fail()
    breaker.succeed()
    breaker.fail()
    breaker.fail()
    assert breaker.admit()


def test_after_the_pause_one_call_goes_alone(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += PAUSE_MIN_S
    assert [breaker.admit(), breaker.admit()] == [True, False]


def test_a_good_probe_closes_it_and_says_so(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += PAUSE_MIN_S
    breaker.admit()
    assert breaker.succeed()
    assert [breaker.admit(), breaker.admit()] == [True, True]


def test_the_pause_doubles_with_each_failed_probe_up_to_the_limit(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    pause, seen = PAUSE_MIN_S, []
    for _ in range(10):
        clock.now += pause - 0.001
        early = breaker.admit()
        clock.now += 0.001
        seen.append((early, breaker.admit(), breaker.fail()))
        pause = min(2 * pause, PAUSE_MAX_S)
    assert seen == [(False, True, False)] * 10
    assert pause == PAUSE_MAX_S


def test_after_it_closed_the_pause_is_short_again(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += PAUSE_MIN_S
    breaker.admit()
    breaker.fail()
    clock.now += 2 * PAUSE_MIN_S
    breaker.admit()
    breaker.succeed()
    trip(breaker)
    clock.now += PAUSE_MIN_S
    assert breaker.admit()


def test_late_failures_do_not_lengthen_the_pause(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += PAUSE_MIN_S / 2
    assert not breaker.fail()
    clock.now += PAUSE_MIN_S / 2
    assert breaker.admit()


def test_an_abandoned_probe_makes_room_for_another(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += PAUSE_MIN_S
    breaker.admit()
    breaker.abandon()
    assert breaker.admit()
