"""A fitted estimate: right in the middle, and hardly ever exceeded."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import stdev

import pytest

from kvblend.engine.bound import KLModel, Shown
from kvblend.engine.evaluation.bound_fit import fit_level
from kvblend.engine.evaluation.calibration import Sample

SHAPE = KLModel(level=0.0, slope=0.7, per_ratio=-1.0, per_entropy=0.2, margin=0.0, spread=0.0, samples=0)
TRUE = replace(SHAPE, level=0.4)


def samples(count: int, spread: float, seed: int = 0) -> list[Sample]:
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        shown = Shown(dice.choice((0.15, 0.3, 0.5)), 0.0, 10 ** dice.uniform(-3, -1), dice.uniform(0.0, 2.0))
        found.append(Sample(shown, TRUE.expect(shown) * math.exp(dice.gauss(0.0, spread))))
    return found


def at_most(model: KLModel, sample: Sample) -> float:
    return model.expect(sample.shown) * math.exp(model.margin)


def test_the_level_is_that_of_the_samples() -> None:
    model = fit_level(SHAPE, samples(400, 0.5))
    assert model.level == pytest.approx(0.4, abs=0.08)
    assert model.spread == pytest.approx(0.5, abs=0.05)
    assert (model.slope, model.per_ratio, model.samples) == (0.7, -1.0, 400)


@pytest.mark.parametrize("count", [8, 16, 48])
def test_new_requests_hardly_ever_exceed_the_limit(count: int) -> None:
    over = 0
    for seed in range(40):
        model = fit_level(SHAPE, samples(count, 0.6, seed))
        over += sum(sample.kl > at_most(model, sample) for sample in samples(50, 0.6, 1000 + seed))
    assert over <= 0.02 * 40 * 50


@pytest.mark.parametrize("kl_max", [0.05, 0.2, 0.8])
def test_few_of_all_requests_are_answered_above_a_bound(kl_max: float) -> None:
    over = taken = 0
    for seed in range(20):
        model = fit_level(SHAPE, samples(24, 0.6, seed))
        for sample in samples(100, 0.6, 1000 + seed):
            holds = model.limit(sample.shown, kl_max) <= kl_max
            taken += holds
            over += holds and sample.kl > kl_max
    assert over <= 0.01 * 20 * 100
    assert taken > 0


def test_no_sample_lies_above_its_own_limit() -> None:
    given = [*samples(12, 0.1), Sample(Shown(0.15, 0.0, 0.01, 1.0), 5.0)]
    model = fit_level(SHAPE, given)
    assert all(sample.kl <= at_most(model, sample) * (1 + 1e-9) for sample in given)


def test_few_samples_make_the_margin_wider() -> None:
    few = fit_level(SHAPE, samples(6, 0.5, 3))
    left = [math.log(sample.kl / SHAPE.expect(sample.shown)) for sample in samples(6, 0.5, 3)]
    assert few.spread > 1.2 * stdev(left)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 5 samples; at least 6 are needed"):
        fit_level(SHAPE, samples(5, 0.5))


def test_samples_without_a_first_try_are_refused() -> None:
    raised = [Sample(Shown(0.3, 0.15, 0.01, 1.0), 0.1)] * 8
    with pytest.raises(ValueError, match="there is no sample of a first try"):
        fit_level(SHAPE, raised)
