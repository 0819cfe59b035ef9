"""Selection by divergence: CacheBlend's method, with one set of rows or with nested ones that shrink layer by layer."""

from __future__ import annotations

import math
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


class DivergenceSelector:
    """Rows whose fresh K (or V, or both) differs most from the cached one at the check layers, by squared L2.

    CacheBlend (arXiv 2405.16444, section 4.3). Layers below the first check layer see every row that is not exact, a
    check layer projects what is left. One set: all rows go on to the last check layer, and the set chosen there counts
    from then on; several check layers are summed, each as shares of its own total. With `recompute_ratios` or
    `thresholds` the set is narrowed at each check layer. A residual corrects, above a check layer, the rows that are
    left out there.
    """

    name = "divergence"

    def __init__(self, spec: SelectorSpec | None = None) -> None:
        self.spec = spec or SelectorSpec()
        self._picker = Picker(self.spec)

    def passes(self, context: SelectionContext) -> Passes:
        """[0..c-1: all rows][c: QKV of all rows, choose][c..: chosen rows], where c are the check layers in turn."""
        self.spec.check_model(context.num_layers)
        if context.budget == 0:
            yield plain_pass(context)
            return
        if self.spec.recompute_ratios or self.spec.thresholds:
            yield from self._narrowing(context)
            return
        scores = yield from summed_change(self.spec, context)
        chosen = self._picker.pick(context, context.cached_rows, scores, context.budget)
        yield last_pass(self.spec, context, chosen)

    def _narrowing(self, context: SelectionContext) -> Passes:
        """Nested sets: each check layer keeps some of the rows that the one before it kept."""
        start, kept, residual = 0, context.cached_rows, None
        for index, layer in enumerate(self.spec.check_layers):
            rows = merge_rows(kept, context.fresh_rows)
            layers = range(start, layer + 1)
            seen = yield Pass(layers, rows, stop="qkv", observe="divergence", residual=residual)
            where = torch.searchsorted(rows, kept)
            if self.spec.thresholds:
                kept = self._above(context, kept, relative_change(self.spec, seen)[where], self.spec.thresholds[index])
            else:
                wanted = math.ceil(self.spec.recompute_ratios[index] * context.cached_rows.shape[0] - 1e-9)
                scores = squared_change(self.spec, seen)[where]
                kept = self._picker.pick(context, kept, scores, min(wanted, context.budget))
            start, residual = layer, build_residual(self.spec, context, kept)
        yield last_pass(self.spec, context, kept)

    def _above(
        self, context: SelectionContext, rows: torch.Tensor, scores: torch.Tensor, threshold: float
    ) -> torch.Tensor:
        """Rows that reach the threshold, and sinks; the budget still bounds them."""
        reached = (scores >= threshold) | self._picker.is_sink(context, rows)
        return self._picker.pick(context, rows[reached], scores[reached], context.budget)


def squared_change(spec: SelectorSpec, seen: Observation) -> torch.Tensor:
    """Squared L2 of fresh against cached K, V or both, by `divergence`: float32 `[rows of the pass]`."""
    if seen.key_change is None or seen.value_change is None:
        raise RuntimeError("the step did not observe divergence")
    return _chosen_of(spec, seen.key_change, seen.value_change)


def relative_change(spec: SelectorSpec, seen: Observation) -> torch.Tensor:
    """`squared_change` divided by the squared L2 of what was cached: float32 `[rows of the pass]`."""
    change = squared_change(spec, seen)
    if seen.key_norm is None or seen.value_norm is None:
        raise RuntimeError("the step did not observe the size of what was cached")
    norm = _chosen_of(spec, seen.key_norm, seen.value_norm)
    return change / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def summed_change(spec: SelectorSpec, context: SelectionContext) -> Generator[Pass, Observation, torch.Tensor]:
    """Passes of every row up to the last check layer; returns the scores of the cached rows, float32 `[cached]`."""
    everything = merge_rows(context.cached_rows, context.fresh_rows)
    where = torch.searchsorted(everything, context.cached_rows)
    start, parts = 0, []
    for layer in spec.check_layers:
        seen = yield Pass(range(start, layer + 1), everything, stop="qkv", observe="divergence")
        parts.append(squared_change(spec, seen)[where])
        start = layer
    if len(parts) == 1:
        return parts[0]
    # keys of one layer may be ten times longer than those of another: only shares can be added
    return torch.stack([part / part.sum().clamp_min(torch.finfo(part.dtype).tiny) for part in parts]).sum(0)


def last_pass(spec: SelectorSpec, context: SelectionContext, chosen: torch.Tensor) -> Pass:
    """Chosen and fresh rows from the last check layer to the end."""
    layers = range(spec.check_layers[-1], context.num_layers)
    return Pass(layers, merge_rows(chosen, context.fresh_rows), residual=build_residual(spec, context, chosen))


def _chosen_of(spec: SelectorSpec, of_keys: torch.Tensor, of_values: torch.Tensor) -> torch.Tensor:
    if spec.divergence == "kv":
        return of_keys + of_values
    return of_keys if spec.divergence == "k" else of_values
