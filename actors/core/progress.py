"""How far one prompt has come on the device, as its step results tell: what is left, and which rows are on their way.

Work is counted in row-layers: one row through one layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvblend.actors.core.events import ItemResult, Job
from kvblend.actors.core.planning import Decision
from kvblend.engine.layout import Reuse

WEIGHT = 0.5
"""What the last step counts against those before it: a prompt gets slower as its rows see more keys."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a prompt needs: `first` rows in each of its first `full` layers, then `rest` rows in the others."""

    first: int
    full: int
    rest: int
    num_layers: int

    @classmethod
    def of(cls, job: Job, decision: Decision, num_layers: int) -> Outlook:
        """As far as it can be told before it is computed; rather too much than too little."""
        plan = decision.plan
        fresh, cached = plan.count(Reuse.FRESH), plan.count(Reuse.CACHED)
        if job.kind == "precompute" or not cached:
            return cls(fresh, 0, fresh, num_layers)
        if job.options.max_kl is not None or job.shape.fixed_ratio:
            return cls(fresh + cached, 0, fresh + cached, num_layers)
        full = 0 if job.shape.waits else min(job.shape.full_layers, num_layers)
        return cls(fresh + cached, full, fresh + plan.budget, num_layers)

    @property
    def row_layers(self) -> int:
        """All of it."""
        return self.first * self.full + self.rest * (self.num_layers - self.full)

    def rows_left(self, done: int) -> int:
        """Rows that the pass under way still has to begin, where `done` row-layers are behind it; at least 1."""
        head = self.first * self.full
        if done < head:
            return math.ceil((head - done) / self.full)
        if done >= self.row_layers:
            return max(1, self.rest)  # it takes longer than it seemed: another pass
        return math.ceil((self.row_layers - done) / (self.num_layers - self.full))


@dataclass(slots=True)
class Progress:
    """`row_layers` are done. `rows` is the size of the slice of rows that is on its way through the layers, 0 where the
    next step begins a new one; `layers` is how far it has come. `row_layer_ms` is what a row-layer of it took lately.
    """

    row_layers: int = 0
    rows: int = 0
    layers: int = 0
    row_layer_ms: float | None = None

    def note(self, result: ItemResult, layers_max: int | None, num_layers: int) -> None:
        """A step went on with it, at most `layers_max` layers further."""
        if not result.rows:
            return
        self.row_layers += result.row_layers
        if result.rows != self.rows:
            self.rows, self.layers = result.rows, 0
        if not result.row_layers:
            return  # it waited for a layer, which may have come since: the slice is on its way
        went = round(result.row_layers / result.rows)
        self.layers += went
        left_early = layers_max is None or went < layers_max
        if result.status != "stalled" and (left_early or self.layers >= num_layers):
            self.rows = self.layers = 0

    def note_speed(self, ms: float) -> None:
        """A row-layer of it took `ms` in the last step."""
        before = self.row_layer_ms
        self.row_layer_ms = ms if before is None else (1.0 - WEIGHT) * before + WEIGHT * ms
