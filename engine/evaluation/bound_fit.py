"""From calibration samples to an estimate of a request's KL, and to what it hardly ever exceeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from kvblend.engine.bound import KLModel
from kvblend.engine.evaluation.calibration import Sample

SAMPLES_MIN = 6
# 2.33 standard deviations of a normal error leave 1 % above them
DEVIATIONS = 2.33
KL_FLOOR = 1e-5


def fit_level(shape: KLModel, samples: Sequence[Sample]) -> KLModel:
    """`shape` with its level, spread and margins from these samples; how KL grows with what is shown is kept.

    The margin is such that a normal error exceeds it once in a hundred, widened for how few the samples are, and never
    below what the worst sample asks for. Raises ValueError for fewer than 6 samples, or none of a first try.
    """
    if len(samples) < SAMPLES_MIN:
        raise ValueError(f"there are {len(samples)} samples; at least {SAMPLES_MIN} are needed")
    left = [math.log(max(s.kl, KL_FLOOR)) - math.log(max(shape.expect(s.shown), KL_FLOOR)) for s in samples]
    count, mean = len(left), math.fsum(left) / len(left)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in left) / (count - 1))
    # a prediction interval with an estimated mean and spread
    spread *= math.sqrt(1.0 + 1.0 / count) * (1.0 + 1.0 / (count - 1))
    margin = max(DEVIATIONS * spread, max(left) - mean)
    model = replace(shape, level=shape.level + mean, margin=margin, spread=spread, samples=count)
    first = [math.log(model.expect(s.shown)) for s in samples if s.shown.ratio_before == 0.0]
    if not first:
        raise ValueError("there is no sample of a first try")
    return replace(model, centre=fmean(first), width=pstdev(first))
