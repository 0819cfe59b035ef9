"""How far load presses the ratio, and whom it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_driver import A, generate

from kvblend.actors.core.jobs import BlendShape
from kvblend.actors.core.lever import RatioLever
from kvblend.actors.messages import BlendOptions


def pressed(floor: float | None = 0.05) -> RatioLever:
    lever = RatioLever(floor, 4)
    for _ in range(60):
        lever.note(8, 4)
    return lever


def test_without_load_the_ratio_is_the_requests() -> None:
    lever = RatioLever(0.05, 4)
    lever.note(0, 3)
    assert lever.lower(generate("r", A), 0.2) == 0.2


def test_under_full_load_it_is_the_floor() -> None:
    assert pressed().lower(generate("r", A), 0.2) == pytest.approx(0.05)


def test_it_follows_the_queue_in_steps() -> None:
    lever, ratios = RatioLever(0.0, 4), []
    for waiting in (4, 4, 4, 2, 1):
        lever.note(waiting, 4)
        ratios.append(lever.lower(generate("r", A), 0.4))
    assert ratios == pytest.approx([0.3, 0.225, 0.169, 0.177, 0.207], abs=0.006)


def test_an_idle_server_forgets_its_load_at_once() -> None:
    lever = pressed()
    lever.note(0, 1)
    assert lever.level == 0.0


def test_it_is_off_without_a_floor() -> None:
    assert pressed(None).lower(generate("r", A), 0.2) == 0.2


@pytest.mark.parametrize(
    "job",
    [
        replace(generate("r", A), options=BlendOptions(max_kl=0.1)),
        replace(generate("r", A), shape=BlendShape(fixed_ratio=True)),
        generate("r", A, mode="reuse"),
    ],
    ids=["max_kl", "fixed", "mode"],
)
def test_who_bounds_the_kl_or_says_more_than_a_ratio_is_left_alone(job: object) -> None:
    assert pressed().lower(job, 0.2) == 0.2  # type: ignore[arg-type]


def test_a_ratio_below_the_floor_is_not_raised() -> None:
    assert pressed(0.1).lower(generate("r", A), 0.05) == 0.05
