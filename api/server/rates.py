"""How much one caller may ask for: requests per minute, and requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvblend.actors.errors import RequestError

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Of each key, or of all callers together where there are no keys; 0 is no limit."""

    requests_per_minute_max: int = 0
    requests_running_max: int = 0


class Allowance:
    """One caller's. A minute's worth may come at once; after that each request comes back as its time passes."""

    def __init__(self, limits: RateLimits, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._left = float(limits.requests_per_minute_max)
        self._at_s = clock()
        self.running = 0

    def count(self) -> None:
        """Count a request. RequestError `rate_limited` where there were too many; refused ones do not count."""
        limit = self._limits.requests_per_minute_max
        if not limit:
            return
        now_s, per_s = self._clock(), limit / 60.0
        self._left = min(float(limit), self._left + (now_s - self._at_s) * per_s)
        self._at_s = now_s
        # a billionth short is there: the sum of many small gains is never exact
        if self._left < 1.0 - 1e-9:
            wait_s = (1.0 - self._left) / per_s
            raise RequestError("rate_limited", f"the limit of {limit} requests per minute is reached", None, wait_s)
        self._left -= 1.0

    def enter(self) -> None:
        """A request starts to run. RequestError `rate_limited` where too many run; `leave` ends it."""
        limit = self._limits.requests_running_max
        if limit and self.running >= limit:
            raise RequestError("rate_limited", f"{limit} requests run at once, which is the limit", None, 1.0)
        self.running += 1

    def leave(self) -> None:
        """It runs no more."""
        self.running -= 1
