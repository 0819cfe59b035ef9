"""Selection that looks at nothing: controls, and the cheapest choices there are."""

from __future__ import annotations

import torch

from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, build_residual, merge_rows, plain_pass
from kvblend.engine.selectors.picking import Picker, Places
from kvblend.engine.selectors.spec import SelectorSpec


class BlindSelector:
    """Chooses before anything is computed, so the only cost is the chosen rows.

    "random": scores drawn from `seed`, the same for every prompt with as many cached rows. "sinks": every chunk's first
    token, then every chunk's second, until the budget is spent.
    """

    def __init__(self, spec: SelectorSpec) -> None:
        self.name: str = spec.selector
        self.spec = spec
        self._picker = Picker(spec)

    def passes(self, context: SelectionContext) -> Passes:
        """One pass of the chosen and the fresh rows through all layers."""
        if context.budget == 0:
            yield plain_pass(context)
            return
        rows = context.cached_rows
        chosen = self._picker.pick(context, rows, self._scores(context), context.budget)
        residual = build_residual(self.spec, context, chosen)
        yield Pass(range(context.num_layers), merge_rows(chosen, context.fresh_rows), residual=residual)

    def _scores(self, context: SelectionContext) -> torch.Tensor:
        rows = context.cached_rows
        if self.spec.selector == "sinks":
            return 1.0 / (1.0 + Places(context, rows).offset.double())
        # a torch generator takes seeds of 64 bits
        return torch.rand(rows.shape[0], generator=torch.Generator().manual_seed(self.spec.seed))
