"""From a spec to a selector: the one place that knows all methods by name."""

from __future__ import annotations

from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.blind import BlindSelector
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.mixed import MixedSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.selectors.spec import SelectorSpec


def build_selector(spec: SelectorSpec) -> Selector:
    """The selector of a checked spec. Without a budget each runs one plain pass."""
    match spec.selector:
        case "divergence":
            return DivergenceSelector(spec)
        case "query" | "sensitive":
            return QuerySelector(spec)
        case "union" | "product":
            return MixedSelector(spec)
        case "random" | "sinks":
            return BlindSelector(spec)
