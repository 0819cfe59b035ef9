"""What requests with `max_kl` would have had, told from samples at every step; and what one that knew its KL would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvblend.engine.bound import KLModel, next_step
from kvblend.engine.evaluation.calibration import Sample


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended: the ratio it was answered with, its true KL, and everything it was charged."""

    ratio: float
    kl: float
    charged: float


@dataclass(frozen=True, slots=True)
class Held:
    """Over requests: the share whose KL was at most the bound, the mean charge, the shares raised and made full."""

    requests: int
    held: float
    charged: float
    raised: float
    full: float


def follow(samples: Sequence[Sample], model: KLModel, kl_max: float) -> Outcome:
    """One request as `BoundedSelector` would run it. `samples` are those of one prompt at every step below 1."""
    steps = (*sorted({sample.shown.ratio for sample in samples}), 1.0)
    charged, last = 0.0, None
    ratio: float = steps[0]
    before = 0.0
    while ratio < 1.0:
        last = _find(samples, ratio, before)
        charged += last.charged
        if model.limit(last.shown, kl_max) <= kl_max:
            return Outcome(ratio, last.kl, charged)
        before, ratio = ratio, next_step(steps, last.shown, model, kl_max)
    return Outcome(1.0, 0.0, charged + 1.0)


def follow_oracle(samples: Sequence[Sample], kl_max: float) -> Outcome:
    """The cheapest step that holds, had at once by one who knows every KL."""
    tries = {sample.shown.ratio: Outcome(sample.shown.ratio, sample.kl, sample.charged) for sample in samples}
    fitting = [tried for tried in tries.values() if tried.kl <= kl_max]
    return min(fitting, key=lambda tried: tried.charged, default=Outcome(1.0, 0.0, 1.0))


def summarise_bound(outcomes: Sequence[Outcome], kl_max: float) -> Held:
    """Shares and means over requests; at least one."""
    first = min(outcome.ratio for outcome in outcomes)
    return Held(
        len(outcomes),
        fmean(outcome.kl <= kl_max for outcome in outcomes),
        fmean(outcome.charged for outcome in outcomes),
        fmean(outcome.ratio > first for outcome in outcomes),
        fmean(outcome.ratio == 1.0 for outcome in outcomes),
    )


def _find(samples: Sequence[Sample], ratio: float, before: float) -> Sample:
    for sample in samples:
        if (sample.shown.ratio, sample.shown.ratio_before) == (ratio, before):
            return sample
    raise ValueError(f"there is no sample of ratio {ratio} behind {before}")
