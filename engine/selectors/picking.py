"""From scores to a set of rows of an exact size: sinks first, then evenly spread probes, then the best of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from kvblend.engine.selectors.base import SelectionContext
from kvblend.engine.selectors.spec import SelectorSpec


class Places:
    """Where candidate rows lie: `chunk` and `offset` in it, int64 `[rows]`; `count` chunks in all."""

    def __init__(self, context: SelectionContext, rows: torch.Tensor) -> None:
        spans = context.cached_spans or ((int(context.cached_rows[0]), int(context.cached_rows[-1]) + 1),)
        starts = torch.tensor([start for start, _ in spans], dtype=torch.int64)
        self.count = len(spans)
        self.chunk = torch.searchsorted(starts, rows, right=True) - 1
        self.offset = rows - starts[self.chunk]


class Picker:
    """Fills a budget by a spec's `sinks`, `probes`, `chunk_budget` and `span`."""

    def __init__(self, spec: SelectorSpec) -> None:
        self._spec = spec

    def is_sink(self, context: SelectionContext, rows: torch.Tensor) -> torch.Tensor:
        """Which of `rows` are among the first `sinks` tokens of their chunk: bool `[rows]`."""
        return Places(context, rows).offset < self._spec.sinks

    def pick(self, context: SelectionContext, rows: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
        """`count` of `rows` (all where there are fewer), ascending. `scores` float `[rows]`, not below 0.

        Ties fall to the earlier position, of two chunks with equal claims to the earlier one.
        """
        if count >= rows.shape[0]:
            return rows
        places = Places(context, rows)
        free = torch.ones(rows.shape[0], dtype=torch.bool)
        free[self._sinks(places)[:count]] = False
        left = count - int((~free).sum())
        probes = math.ceil(self._spec.probes * left - 1e-9)
        free[self._probes(places, free, probes)] = False
        for among, share in self._shares(places, free, scores, left - probes):
            free[self._best(places, among, scores, share)] = False
        return rows[~free]

    def _sinks(self, places: Places) -> torch.Tensor:
        """Indices of the sinks: every chunk's first token, then every chunk's second, and so on."""
        inside = (places.offset < self._spec.sinks).nonzero().flatten()
        return inside[places.offset[inside].sort(stable=True).indices]

    def _probes(self, places: Places, free: torch.Tensor, count: int) -> torch.Tensor:
        """Indices of evenly spread rows: as many per chunk as its free rows ask for, each in the middle of its part."""
        if not count:
            return torch.empty(0, dtype=torch.int64)
        groups = _by_chunk(places, free)
        sizes = [group.shape[0] for group in groups]
        parts = []
        for group, probes in zip(groups, divide(count, [float(size) for size in sizes], sizes), strict=True):
            # (2i + 1) n / 2k is the middle of the i-th of k equal parts of n rows
            parts.append(group[(2 * torch.arange(probes) + 1) * group.shape[0] // max(1, 2 * probes)])
        return torch.cat(parts)

    def _shares(
        self, places: Places, free: torch.Tensor, scores: torch.Tensor, count: int
    ) -> list[tuple[torch.Tensor, int]]:
        """Indices of free rows that compete with each other, and how many of them are taken."""
        if self._spec.chunk_budget == "free":
            return [(free.nonzero().flatten(), count)]
        groups = _by_chunk(places, free)
        need = self._spec.chunk_budget == "need"
        weights = [float(scores[group].double().sum()) if need else 1.0 for group in groups]
        return list(zip(groups, divide(count, weights, [group.shape[0] for group in groups]), strict=True))

    def _best(self, places: Places, among: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Indices of the best `count`: single rows, or whole blocks by their sum and the first rows of one more."""
        if self._spec.span == 1:
            return among[scores[among].sort(descending=True, stable=True).indices[:count]]
        blocks = torch.stack((places.chunk[among], places.offset[among] // self._spec.span))
        _, block = blocks.unique_consecutive(dim=1, return_inverse=True)
        sums = torch.zeros(int(block[-1]) + 1 if block.numel() else 0, dtype=torch.float64)
        sums.index_add_(0, block, scores[among].double())
        rank = sums.sort(descending=True, stable=True).indices.argsort()
        return among[rank[block].sort(stable=True).indices[:count]]


def divide(count: int, weights: Sequence[float], room: Sequence[int]) -> list[int]:
    """Whole shares of `count` in proportion to `weights` (largest remainder), none above its `room`.

    What does not fit into one is divided again among the others. Weights that sum to nothing (or to no number) count
    as equal.
    """
    shares = [0] * len(room)
    left = min(count, sum(room))
    while left:
        still = [i for i in range(len(room)) if shares[i] < room[i]]
        total = math.fsum(weights[i] for i in still)
        usable = math.isfinite(total) and total > 0
        # fractions: the sum of the floors must not exceed what is left, whatever the weights
        parts = {i: Fraction(weights[i]) if usable else Fraction(1) for i in still}
        whole = sum(parts.values())
        exact = {i: left * part / whole for i, part in parts.items()}
        floors = {i: math.floor(value) for i, value in exact.items()}
        ones = left - sum(floors.values())
        for rank, i in enumerate(sorted(still, key=lambda i: (floors[i] - exact[i], i))):
            given = min(floors[i] + (rank < ones), room[i] - shares[i])
            shares[i] += given
            left -= given
    return shares


def _by_chunk(places: Places, free: torch.Tensor) -> list[torch.Tensor]:
    return [(free & (places.chunk == chunk)).nonzero().flatten() for chunk in range(places.count)]
