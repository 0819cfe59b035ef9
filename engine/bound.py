"""A bound on one request's KL from a full prefill: the ladder of ratios, and the estimate from what a request shows.

Torch-free: requests and settings are checked with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

RATIO_MIN, RATIO_MIDDLE = 0.05, 0.5
# KL falls about as this power of the ratio (docs/quality.md, "A bound per request")
RAISE_POWER = 0.7
RISK_MAX = 0.005
_POINTS = 64


def ladder(ratio: float) -> tuple[float, ...]:
    """The ratios that a request with a bound may use, rising: its own (at least 0.05), twice that, 0.5, all."""
    first = max(ratio, RATIO_MIN)
    steps = [first, *(step for step in (2.0 * first, RATIO_MIDDLE) if first < step <= RATIO_MIDDLE), 1.0]
    return tuple(sorted(dict.fromkeys(steps)))


@dataclass(frozen=True, slots=True)
class Shown:
    """What a blend shows of itself. `ratio` is its share of recomputed rows.

    `change` is the mean KL, over the drafted answer's positions, from this blend to the one before it, which recomputed
    the share `ratio_before`; `entropy` the mean entropy there, in nats.
    """

    ratio: float
    ratio_before: float
    change: float
    entropy: float


@dataclass(frozen=True, slots=True)
class KLModel:
    """log KL = `level` + `slope` log(change + `floor`) + `per_ratio` ratio + `per_entropy` entropy, +- `spread`.

    `margin` is what one request's log KL exceeds once in a hundred. `centre` and `width` say where the estimates of
    first tries lie among requests (log KL, as a normal distribution). `samples` calibration runs were used.
    """

    level: float
    slope: float
    per_ratio: float
    per_entropy: float
    margin: float
    spread: float
    samples: int
    floor: float = 1e-4
    centre: float = 0.0
    width: float = 0.0

    def expect(self, shown: Shown) -> float:
        """The likeliest KL."""
        if not math.isfinite(shown.change):
            return math.inf
        log_change = math.log(max(0.0, shown.change) + self.floor)
        found = self.level + self.slope * log_change + self.per_ratio * shown.ratio + self.per_entropy * shown.entropy
        return math.exp(min(50.0, found))

    def limit(self, shown: Shown, kl_max: float) -> float:
        """What a request with the bound `kl_max` is judged by: it is answered where this is not above the bound.

        A first try is one of many requests, most of which hold a wide bound anyway: its margin is such that few of all
        requests exceed the bound. A request that was raised is one of the hard ones, and judged by itself.
        """
        margin = self.margin if shown.ratio_before > 0.0 else self.first_margin(kl_max)
        return self.expect(shown) * math.exp(margin)

    def first_margin(self, kl_max: float) -> float:
        """The least margin, `spread` to `margin`, with which at most `RISK_MAX` of all first tries exceed the bound."""
        if self.width <= 0.0 or self.spread <= 0.0 or kl_max <= 0.0:
            return self.margin
        bound = math.log(kl_max)
        points = [self.centre + self.width * (-4.0 + 8.0 * i / _POINTS) for i in range(_POINTS + 1)]
        weights = [math.exp(-0.5 * ((point - self.centre) / self.width) ** 2) for point in points]
        over = [0.5 * math.erfc((bound - point) / self.spread / math.sqrt(2.0)) for point in points]
        total = math.fsum(weights)
        for step in range(_POINTS):
            margin = self.spread + (self.margin - self.spread) * step / _POINTS
            taken = zip(points, weights, over, strict=True)
            if math.fsum(w * p for point, w, p in taken if point + margin <= bound) <= RISK_MAX * total:
                return margin
        return self.margin

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """The inverse of `to_fields`. ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        if set(given) != names or not all(isinstance(given[n], int | float) and math.isfinite(given[n]) for n in names):
            raise ValueError(f"not a calibration: {dict(given)!r}")
        return cls(**given)

    def to_fields(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def next_step(steps: Sequence[float], last: Shown, model: KLModel, kl_max: float) -> float:
    """The first step above `last` that is expected to be enough; at last 1."""
    now = model.limit(last, kl_max)
    higher = (step for step in steps if last.ratio < step < 1.0)
    return next((step for step in higher if now * (last.ratio / step) ** RAISE_POWER <= kl_max), 1.0)


UNKNOWN = KLModel(math.inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
"""Holds nothing."""
