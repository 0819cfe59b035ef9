"""When requests are due: times set before the first one is sent, which no slow answer can move."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def arrivals(count: int, rate: float, burstiness: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Seconds after the start, ascending, of `count` requests at `rate` per second (inf: all at 0).

    Gaps are gamma distributed with mean 1 / rate; `burstiness` is the shape: 1 is Poisson's, inf a clock's.
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    return np.cumsum(random.gamma(burstiness, 1 / (rate * burstiness), count))


def split_limit(limit: int | None, jobs: int, processes: int) -> list[int | None]:
    """How many requests at once each process may run; as many entries as processes are of use."""
    useful = max(1, min(processes, jobs, limit or jobs))
    if limit is None:
        return [None] * useful
    return [limit // useful + (index < limit % useful) for index in range(useful)]
