"""Intervals of a mean, or of a ratio of means, over questions: the paired percentile bootstrap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
LEVEL = 0.95
Floats = npt.NDArray[np.float64]


class Bootstrap:
    """One seeded set of resamples of `count` questions, shared by every figure: that is what makes them paired."""

    def __init__(self, count: int, seed: int, resamples: int = RESAMPLES) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; at least 1 question is needed")
        generator = np.random.default_rng(seed)
        self.count = count
        self._picks = generator.integers(0, count, size=(resamples, count))

    def mean(self, values: Sequence[float]) -> tuple[float, float]:
        """The 95 % interval of the mean of one value per question."""
        return self._interval(self._means(values))

    def recovery(self, values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
        """The 95 % interval of `1 - mean(values) / mean(baseline)`; resamples in which the baseline is 0 count as 0."""
        means, base = self._means(values), self._means(baseline)
        usable = base > 0.0
        return self._interval(np.where(usable, 1.0 - means / np.where(usable, base, 1.0), 0.0))

    def _means(self, values: Sequence[float]) -> Floats:
        given = np.asarray(values, dtype=np.float64)
        if given.shape != (self.count,):
            raise ValueError(f"{given.shape[0] if given.ndim else 0} values for {self.count} questions")
        means: Floats = given[self._picks].mean(axis=1)
        return means

    def _interval(self, means: Floats) -> tuple[float, float]:
        tail = 100.0 * (1.0 - LEVEL) / 2.0
        low, high = np.percentile(means, (tail, 100.0 - tail))
        return float(low), float(high)
