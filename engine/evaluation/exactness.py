"""What the gate's exact checks need: rows to compute again whatever they are, and how far two results lie apart."""

from __future__ import annotations

import math

import torch

from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, merge_rows


class EveryNthRow:
    """Computes every n-th cached row again, whatever the budget: rows with gaps between them."""

    name = "every_nth"

    def __init__(self, n: int) -> None:
        self._n = n

    def passes(self, context: SelectionContext) -> Passes:
        """One pass over those rows and the fresh ones."""
        rows = merge_rows(context.cached_rows[:: self._n], context.fresh_rows)
        yield Pass(range(context.num_layers), rows)


def difference(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest absolute difference as a share of the largest wanted number; infinite where one is no number."""
    with torch.inference_mode():
        scale = wanted.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        value = float(((given - wanted).abs().max() / scale).float())
    return math.inf if math.isnan(value) else value
