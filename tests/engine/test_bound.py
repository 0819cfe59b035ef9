"""The ladder of ratios and the estimate of a request's KL."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvblend.engine.bound import KLModel, Shown, ladder

MODEL = KLModel(level=0.5, slope=0.7, per_ratio=-1.0, per_entropy=0.0, margin=1.2, spread=0.6, samples=20)
SHOWN = Shown(0.15, 0.0, 0.02, 1.0)


@pytest.mark.parametrize(
    ("ratio", "steps"),
    [
        (0.15, (0.15, 0.3, 0.5, 1.0)),
        (0.05, (0.05, 0.1, 0.5, 1.0)),
        (0.0, (0.05, 0.1, 0.5, 1.0)),
        (0.25, (0.25, 0.5, 1.0)),
        (0.4, (0.4, 0.5, 1.0)),
        (0.5, (0.5, 1.0)),
        (0.8, (0.8, 1.0)),
        (1.0, (1.0,)),
    ],
)
def test_the_ladder_doubles_then_halves_then_takes_all(ratio: float, steps: tuple[float, ...]) -> None:
    assert ladder(ratio) == steps


def test_the_estimate_is_a_power_of_the_change() -> None:
    expected = math.exp(0.5 + 0.7 * math.log(0.02 + MODEL.floor) - 0.15)
    assert MODEL.expect(SHOWN) == pytest.approx(expected)


def test_a_raised_request_is_judged_by_the_estimate_and_its_margin() -> None:
    raised = replace(SHOWN, ratio=0.3, ratio_before=0.15)
    model = replace(MODEL, centre=-3.0, width=0.5)
    assert model.limit(raised, 10.0) == pytest.approx(model.expect(raised) * math.exp(1.2))


def test_a_first_try_has_a_smaller_margin_where_most_requests_hold_the_bound_anyway() -> None:
    model = replace(MODEL, centre=-4.0, width=0.5)
    margins = [model.first_margin(kl_max) for kl_max in (0.01, 0.03, 0.1, 1.0)]
    assert margins[-1] == model.spread
    assert margins[2] > margins[3]
    assert max(margins) <= model.margin


def test_without_knowing_other_requests_a_first_try_is_judged_by_itself() -> None:
    assert MODEL.first_margin(0.1) == MODEL.margin


def test_entropy_counts_where_it_was_found_to_matter() -> None:
    model = replace(MODEL, per_entropy=0.5)
    assert model.expect(replace(SHOWN, entropy=3.0)) == pytest.approx(model.expect(SHOWN) * math.exp(1.0))


@pytest.mark.parametrize("change", [math.nan, math.inf])
def test_a_change_that_is_no_number_holds_no_bound(change: float) -> None:
    assert MODEL.limit(replace(SHOWN, change=change), 0.1) == math.inf


def test_a_calibration_survives_its_plain_form() -> None:
    assert KLModel.from_fields(MODEL.to_fields()) == MODEL


@pytest.mark.parametrize("given", [{}, {**MODEL.to_fields(), "slope": "x"}, {**MODEL.to_fields(), "level": math.nan}])
def test_what_is_no_calibration_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a calibration"):
        KLModel.from_fields(given)
