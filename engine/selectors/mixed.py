"""What the question looks at together with what has changed: unions and products of both scores."""

from __future__ import annotations

import torch

from kvblend.engine.selectors.base import Passes, SelectionContext, merge_rows, plain_pass
from kvblend.engine.selectors.divergence import last_pass, summed_change
from kvblend.engine.selectors.picking import Picker
from kvblend.engine.selectors.query import question_attention
from kvblend.engine.selectors.spec import SelectorSpec


class MixedSelector:
    """Scores by attention and by divergence, so it pays for both.

    "union": half of the budget, rounded up, by attention, then the rest by divergence among the rows left.
    "product": by the product of both scores, each divided by its largest.
    """

    def __init__(self, spec: SelectorSpec) -> None:
        self.name: str = spec.selector
        self.spec = spec
        self._picker = Picker(spec)

    def passes(self, context: SelectionContext) -> Passes:
        """[0..L-1: fresh rows, scored][0..c: all rows, choose][c..L-1: chosen and fresh], c the last check layer."""
        self.spec.check_model(context.num_layers)
        if context.budget == 0:
            yield plain_pass(context)
            return
        attention = yield from question_attention(self.spec, context)
        change = yield from summed_change(self.spec, context)
        pick = self._union if self.spec.selector == "union" else self._product
        yield last_pass(self.spec, context, pick(context, attention, change))

    def _union(self, context: SelectionContext, attention: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        rows, half = context.cached_rows, (context.budget + 1) // 2
        first = self._picker.pick(context, rows, attention, half)
        left = ~torch.isin(rows, first)
        second = self._picker.pick(context, rows[left], change[left], context.budget - half)
        return merge_rows(first, second)

    def _product(self, context: SelectionContext, attention: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        # raw scores may be small enough for their product to vanish in float32
        scores = _by_largest(attention) * _by_largest(change)
        return self._picker.pick(context, context.cached_rows, scores, context.budget)


def _by_largest(scores: torch.Tensor) -> torch.Tensor:
    return scores.double() / scores.double().max().clamp_min(torch.finfo(torch.float64).tiny)
