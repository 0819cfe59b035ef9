"""The ratio as a lever: under load blends recompute less, down to a floor that the server's owner has set."""

from __future__ import annotations

from kvblend.actors.core.events import Job

STEP = 0.25
"""How far one decision moves the lever towards what the queue asks for."""


class RatioLever:
    """`level` is 0 where nobody waits and 1 where as many wait as may run; between them it follows the queue.

    Off without a floor. It never moves a request that bounds its KL (`max_kl`), one whose rows are not chosen by one
    ratio, or one that asks for less than the floor.
    """

    def __init__(self, floor: float | None, max_num_seqs: int) -> None:
        self.floor = floor
        self.level = 0.0
        self._max_num_seqs = max_num_seqs

    def note(self, waiting: int, running: int) -> None:
        """So many answers wait for room while so many run. An idle server forgets its load at once."""
        target = min(1.0, waiting / self._max_num_seqs)
        self.level = 0.0 if not waiting and running <= 1 else self.level + STEP * (target - self.level)

    def lower(self, job: Job, ratio: float) -> float:
        """The ratio of a request that would have `ratio`, in whole hundredths where it is lowered."""
        held = job.mode != "blend" or job.options.max_kl is not None or job.shape.fixed_ratio
        if self.floor is None or held or ratio <= self.floor or not self.level:
            return ratio
        lowered = ratio - self.level * (ratio - self.floor)
        return max(self.floor, min(ratio, round(lowered, 2)))
