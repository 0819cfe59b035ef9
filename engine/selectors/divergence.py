"""Selection by divergence at one layer: CacheBlend's method with one set of rows for all later layers."""

from __future__ import annotations

from typing import Literal

import torch

from kvblend.engine.residual import Residual, ResidualKind
from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, merge_rows, top_rows


class DivergenceSelector:
    """Rows whose fresh K (or V, or both) at `check_layer` differs most from the cached one, by squared L2.

    CacheBlend (arXiv 2405.16444, section 4.3) with the choice kept from the check layer on. Layers below see every
    row that is not exact; the check layer projects them all; from there only chosen rows and fresh ones go on. With a
    `residual` the rows that are left are corrected, above the check layer, by what the chosen ones show.
    """

    name = "divergence"

    def __init__(
        self,
        check_layer: int = 1,
        of: Literal["k", "v", "kv"] = "k",
        residual: ResidualKind | None = None,
        fraction: float = 0.8,
    ) -> None:
        if check_layer < 1:
            raise ValueError(f"check_layer is {check_layer}; layer 0 cannot diverge, the first that can is 1")
        if of not in ("k", "v", "kv"):
            raise ValueError(f"divergence is {of!r}; choose k, v, kv")
        self.check_layer = check_layer
        self.of = of
        self.residual = residual
        self.fraction = fraction

    def passes(self, context: SelectionContext) -> Passes:
        """[0..c-1: all rows][c: QKV of all rows, choose][c..L-1: chosen rows]; without a budget one plain pass."""
        last = context.num_layers
        if self.check_layer >= last:
            raise ValueError(f"check_layer is {self.check_layer}; the model has layers 0..{last - 1}")
        if context.budget == 0:
            yield Pass(range(last), context.fresh_rows)
            return
        everything = merge_rows(context.cached_rows, context.fresh_rows)
        seen = yield Pass(range(self.check_layer + 1), everything, stop="qkv", observe="divergence")
        if seen.key_change is None or seen.value_change is None:
            raise RuntimeError("the step did not observe divergence")
        change = {"k": seen.key_change, "v": seen.value_change, "kv": seen.key_change + seen.value_change}[self.of]
        scores = change[torch.searchsorted(everything, context.cached_rows)]
        chosen = top_rows(context.cached_rows, scores, context.budget)
        residual = Residual.build(self.residual, self.fraction, context.cached_spans, context.cached_rows, chosen)
        yield Pass(range(self.check_layer, last), merge_rows(chosen, context.fresh_rows), residual=residual)
