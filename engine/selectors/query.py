"""Question-guided selection: what the question looks at, over the reused KV, is computed again."""

from __future__ import annotations

from kvblend.engine.residual import Residual, ResidualKind
from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, merge_rows, top_rows


class QuerySelector:
    """Rows that receive most attention from the question's rows, weighted by the norm of their V.

    A first pass runs the fresh rows over the reused KV through all layers and scores every key (summed over
    `score_layers`, all when None, heads and question rows); no layer is computed in full. The second pass computes the
    chosen and the fresh rows. With a `residual` the rows that are left are corrected by what the chosen ones show.
    """

    name = "query"

    def __init__(
        self,
        score_layers: frozenset[int] | None = None,
        residual: ResidualKind | None = None,
        fraction: float = 0.8,
    ) -> None:
        self.score_layers = score_layers
        self.residual = residual
        self.fraction = fraction

    def passes(self, context: SelectionContext) -> Passes:
        """[0..L-1: fresh rows, scored][0..L-1: chosen and fresh rows]; without a budget one plain pass."""
        layers = range(context.num_layers)
        if context.budget == 0:
            yield Pass(layers, context.fresh_rows)
            return
        seen = yield Pass(layers, context.fresh_rows, observe="attention", score_layers=self.score_layers)
        if seen.attention is None:
            raise RuntimeError("the step did not observe attention")
        chosen = top_rows(context.cached_rows, seen.attention[context.cached_rows], context.budget)
        residual = Residual.build(self.residual, self.fraction, context.cached_spans, context.cached_rows, chosen)
        yield Pass(layers, merge_rows(chosen, context.fresh_rows), residual=residual)
