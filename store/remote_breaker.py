"""When to leave a failing server alone: book-keeping with a clock that is handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

FAILURES_MAX = 3
"""This many failures in a row, and the server is left alone."""
PAUSE_MIN_S = 1.0
PAUSE_MAX_S = 60.0

BreakerState = Literal["closed", "open", "probing"]


class Breaker:
    """Closed: every call may go. Open: none, until a pause in seconds is over; then one call goes and decides.

    The pause doubles with each failed probe up to `PAUSE_MAX_S`. Who was admitted reports `succeed`, `fail` or
    `abandon`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._failures = 0
        self._pause_s = PAUSE_MIN_S
        self._until = 0.0
        self.state: BreakerState = "closed"

    def admit(self) -> bool:
        """Whether a call may go now."""
        if self.state == "closed":
            return True
        if self.state == "open" and self._clock() >= self._until:
            self.state = "probing"
            return True
        return False

    def succeed(self) -> bool:
        """A call went well; True when this ends a time of being left alone."""
        was_open = self.state != "closed"
        self.state = "closed"
        self._failures = 0
        self._pause_s = PAUSE_MIN_S
        return was_open

    def fail(self) -> bool:
        """A call failed; True when the server is left alone from now on and was not before."""
        if self.state == "probing":
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            self._open()
            return False
        # calls that began before the pause end while it lasts: they tell nothing new
        if self.state == "open":
            return False
        self._failures += 1
        if self._failures < FAILURES_MAX:
            return False
        self._open()
        return True

    def abandon(self) -> None:
        """An admitted call ended without an outcome; if it was the probe, another one may go."""
        if self.state == "probing":
            self.state = "open"

    def _open(self) -> None:
        self.state = "open"
        self._until = self._clock() + self._pause_s
