"""Selectors that choose nothing: a full prefill, and reuse without recomputing."""

from __future__ import annotations

from kvblend.engine.selectors.base import Pass, Passes, SelectionContext


class PlainSelector:
    """One pass over the rows that must be computed anyway. With no cached rows that is a full prefill."""

    name = "plain"

    def passes(self, context: SelectionContext) -> Passes:
        """A single pass over `fresh_rows`; the budget is ignored."""
        yield Pass(range(context.num_layers), context.fresh_rows)
