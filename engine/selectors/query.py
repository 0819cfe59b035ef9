"""Question-guided selection: what the question looks at, over the reused KV, is computed again."""

from __future__ import annotations

from collections.abc import Generator

import torch

from kvblend.engine.selectors.base import (
    Observation,
    Pass,
    Passes,
    SelectionContext,
    build_residual,
    merge_rows,
    plain_pass,
)
from kvblend.engine.selectors.picking import Picker
from kvblend.engine.selectors.spec import SelectorSpec

# attention decides too much with 1, too little with 2 (docs/quality.md)
SENSITIVITY_POWER = 1.5


class QuerySelector:
    """Rows that receive most attention from the question's rows, weighted by the norm of their V.

    A first pass runs the fresh rows over the reused KV, up to the last of `score_layers`, and scores every key (summed
    over those layers, heads and question rows); no layer is computed in full. The second pass computes the chosen and
    the fresh rows. A residual corrects the rows that are left by what the chosen ones show. As "sensitive" the
    attention is weighted with how much the tokens' KV differed between the two texts it was computed behind.
    """

    def __init__(self, spec: SelectorSpec | None = None) -> None:
        self.spec = spec or SelectorSpec("query")
        self.name: str = self.spec.selector
        self._picker = Picker(self.spec)

    def passes(self, context: SelectionContext) -> Passes:
        """[0..s: fresh rows, scored][0..L-1: chosen and fresh], s the last scored layer; no budget: one plain pass."""
        self.spec.check_model(context.num_layers)
        if context.budget == 0:
            yield plain_pass(context)
            return
        scores = yield from question_attention(self.spec, context, sensitive=self.spec.selector == "sensitive")
        chosen = self._picker.pick(context, context.cached_rows, scores, context.budget)
        residual = build_residual(self.spec, context, chosen)
        yield Pass(range(context.num_layers), merge_rows(chosen, context.fresh_rows), residual=residual)


def question_attention(
    spec: SelectorSpec, context: SelectionContext, *, sensitive: bool = False
) -> Generator[Pass, Observation, torch.Tensor]:
    """One pass of the fresh rows over the reused KV; returns the scores of the cached rows, float32 `[cached]`.

    `sensitive` weights them with the tokens' stored sensitivity (of the layers of the pass), where any was stored with
    it; a row without one counts as an average row.
    """
    scored = spec.scored(context.num_layers)
    layers = range(context.num_layers if scored is None else max(scored) + 1)
    seen = yield Pass(layers, context.fresh_rows, observe="attention", score_layers=scored)
    if seen.attention is None:
        raise RuntimeError("the step did not observe attention")
    scores = seen.attention[context.cached_rows]
    if not sensitive or seen.sensitivity is None:
        return scores
    weights = seen.sensitivity[context.cached_rows]
    return scores * torch.where(weights.isnan(), weights.nanmean(), weights).nan_to_num(1.0) ** SENSITIVITY_POWER
