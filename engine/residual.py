"""Residual correction: cached rows that are not computed again are moved by what was seen on those that are.

Per layer and kv head, in the un-rotated frame, learnt from nothing but the request itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvblend.engine.kv import KVSlab
from kvblend.engine.rope import RopeTable, add_rotated, rotate

ResidualKind = Literal["mean", "distance", "ridge", "lowrank"]
RESIDUALS: tuple[ResidualKind, ...] = ("mean", "distance", "ridge", "lowrank")
DISTANCE_TOKENS = 32.0
RIDGE_PENALTY = 10.0
LOW_RANK = 4
_SPREAD = ("distance", "lowrank")


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """One chunk at positions `start..end-1`, and the chosen rows `low..high-1` (of all chosen ones) it learns from.

    `weights` float32 `[end - start, high - low]`: what each of its rows takes of their changes; 0 for chosen rows.
    `others` bool `[end - start]`: its rows that were not chosen.
    """

    chunk: int
    start: int
    end: int
    low: int
    high: int
    weights: torch.Tensor
    others: torch.Tensor


class Residual:
    """Adds `fraction` of the change that a chunk's chosen rows show to its other rows, K and V alike.

    "mean": the chunk's mean change. "distance": its chosen rows weighted by exp(-|distance| / 32) beside their mean
    with weight 1, no row's change longer than the median (K and V apart). "ridge": the chunk's mean change,
    plus one linear map per head from a row's cached [K, V] to its change, fitted on all chosen rows
    around their chunk's mean with penalty 10 times the mean squared feature. "lowrank": as "distance", but of what a
    row's change differs from its chunk's mean only the part in the 4 directions is spread in which the chosen rows of
    all chunks differ most, per head, K and V apart. A chunk without chosen rows takes the mean of all.
    """

    def __init__(
        self, kind: ResidualKind, fraction: float, cached_spans: tuple[tuple[int, int], ...], chosen: torch.Tensor
    ) -> None:
        if kind not in RESIDUALS:
            raise ValueError(f"residual is {kind!r}; choose {', '.join(RESIDUALS)}")
        self.kind = kind
        self.fraction = fraction
        self._chosen = chosen
        starts = torch.tensor([start for start, _ in cached_spans], dtype=torch.int64)
        self._chosen_chunk = torch.searchsorted(starts, chosen, right=True) - 1
        self._blocks = [self._block(index, *span) for index, span in enumerate(cached_spans)] if len(chosen) else []

    @classmethod
    def build(
        cls,
        kind: ResidualKind | None,
        fraction: float,
        cached_spans: tuple[tuple[int, int], ...],
        cached_rows: torch.Tensor,
        chosen: torch.Tensor,
    ) -> Residual | None:
        """The correction of one pass; None where none is wanted or no cached row is left to correct."""
        if kind is None or chosen.shape[0] >= cached_rows.shape[0]:
            return None
        return cls(kind, fraction, cached_spans, chosen)

    def correct(
        self, slab: KVSlab, layer: int, rows: torch.Tensor, raw_k: torch.Tensor, v: torch.Tensor, rope: RopeTable
    ) -> None:
        """Correct the other rows of one layer in `slab`, before the fresh rows are written.

        `rows` (positions, CPU) are the pass's, `raw_k` un-rotated and `v` their fresh K and V
        `[rows, kv_heads, head_dim]`.
        """
        if not self._blocks:
            return
        device, heads, dim = raw_k.device, raw_k.shape[1], raw_k.shape[2]
        where = torch.searchsorted(rows, self._chosen).to(device)
        old = self._read(slab, layer, self._chosen.to(device), rope)
        change = torch.cat((raw_k[where], v[where]), dim=-1).sub_(old)
        mapped = self._ridge_map(old, change) if self.kind == "ridge" else None
        if self.kind in _SPREAD:
            change = _limited(change)
        if self.kind == "lowrank":
            centres = self._own_centres(change)
            change = centres + _low_rank(change - centres, LOW_RANK)
        for block in self._blocks:
            weights = block.weights.to(device, change.dtype)
            # one product for all heads: the rows of a chunk learn from those of their own chunk only
            moved = weights @ change[block.low : block.high].view(block.high - block.low, -1)
            moved = moved.view(-1, heads, 2 * dim)
            if mapped is not None:
                moved += self._ridge(slab, layer, block, old, mapped, rope).mul_(self.fraction)
            moved = moved.transpose(0, 1)
            cos, sin = rope.span(block.start, block.end)
            add_rotated(slab.k[layer][:, block.start : block.end], moved[..., :dim], cos, sin)
            slab.v[layer][:, block.start : block.end].add_(moved[..., dim:])

    def _ridge_map(self, old: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """The linear map per head `[kv_heads, 2 * head_dim, 2 * head_dim]` from [K, V] to their change."""
        x = (old - self._own_centres(old)).transpose(0, 1).float()
        y = (change - self._own_centres(change)).transpose(0, 1).float()
        gram = x.transpose(1, 2) @ x
        # the squared length of an average row, ten times over: about as strong as ten more rows
        penalty = RIDGE_PENALTY * x.square().sum((1, 2)) / x.shape[1]
        gram.diagonal(dim1=1, dim2=2).add_(penalty[:, None].clamp_min(1e-12))
        solved: torch.Tensor = torch.linalg.solve(gram, x.transpose(1, 2) @ y)
        return solved

    def _ridge(
        self, slab: KVSlab, layer: int, block: _Block, old: torch.Tensor, mapped: torch.Tensor, rope: RopeTable
    ) -> torch.Tensor:
        """The linear part for the rows of a chunk `[rows, kv_heads, 2 * head_dim]`, 0 for chosen ones."""
        centre = self._centres(old)[block.chunk]
        features = self._read(slab, layer, torch.arange(block.start, block.end, device=old.device), rope) - centre
        part = torch.bmm(features.transpose(0, 1).float(), mapped).transpose(0, 1).to(old.dtype)
        return part.mul_(block.others.to(part)[:, None, None])

    def _centres(self, values: torch.Tensor) -> torch.Tensor:
        """Means over the chosen rows of each chunk, of all where it has none: `[chunks, ...]` of `[chosen, ...]`."""
        parts = [values[self._members(block.chunk).to(values.device)].mean(0) for block in self._blocks]
        return torch.stack(parts)

    def _own_centres(self, change: torch.Tensor) -> torch.Tensor:
        """For each chosen row the mean over the chosen rows of its chunk, in the shape of `change` `[chosen, ...]`."""
        return self._centres(change)[self._chosen_chunk.to(change.device)]

    def _read(self, slab: KVSlab, layer: int, rows: torch.Tensor, rope: RopeTable) -> torch.Tensor:
        """Cached [K un-rotated, V] of `rows`: `[rows, kv_heads, 2 * head_dim]`."""
        cos, sin = rope.gather_inverse(rows)
        k = slab.k[layer].index_select(1, rows).transpose(0, 1)
        v = slab.v[layer].index_select(1, rows).transpose(0, 1)
        return torch.cat((rotate(k, cos[:, None], sin[:, None]), v), dim=-1)

    def _members(self, chunk: int) -> torch.Tensor:
        """Indices of the chosen rows that a chunk learns from: its own, all where it has none."""
        own = (self._chosen_chunk == chunk).nonzero().flatten()
        return own if own.numel() else torch.arange(self._chosen.shape[0])

    def _block(self, chunk: int, start: int, end: int) -> _Block:
        # neighbours in position order: the members of a chunk are a stretch of the chosen rows
        members, places = self._members(chunk), torch.arange(start, end)
        low, high = int(members[0]), int(members[-1]) + 1
        mean = torch.full((end - start, high - low), 1.0 / (high - low))
        weights = self._by_distance(places, mean, low, high) if self.kind in _SPREAD else mean
        chosen = torch.isin(places, self._chosen)
        weights[chosen] = 0.0
        return _Block(chunk, start, end, low, high, weights.mul_(self.fraction), ~chosen)

    def _by_distance(self, places: torch.Tensor, mean: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Weights that fall with the distance and sum to 1 per row; the chunk's mean weighs like one row at hand."""
        distance = (places[:, None] - self._chosen[None, low:high]).abs().float()
        near = torch.exp(-distance / DISTANCE_TOKENS)
        # far from every chosen row the mean of the chunk is all that is known
        return (near + mean) / (near.sum(1, keepdim=True) + 1.0)


def _limited(change: torch.Tensor) -> torch.Tensor:
    """`change` `[rows, kv_heads, 2 * head_dim]` with no row's K or V part longer than the median of a head's rows.

    Tokens that gather attention change by many times what others do; spread to their neighbours that does harm.
    """
    rows, kv_heads, width = change.shape
    parts = change.view(rows, kv_heads, 2, width // 2)
    length = parts.norm(dim=-1, keepdim=True)
    limit = length.median(0, keepdim=True).values
    limited: torch.Tensor = parts * (limit / length.clamp_min(1e-12)).clamp_max(1.0)
    return limited.view(rows, kv_heads, width)


def _low_rank(deviation: torch.Tensor, rank: int) -> torch.Tensor:
    """`deviation` `[rows, kv_heads, 2 * head_dim]` without what lies outside its `rank` main directions.

    Those are found over all rows, per head, K and V apart: the best approximation of that rank. Where there are no more
    directions than that, it stays as it is.
    """
    rows, kv_heads, width = deviation.shape
    parts = deviation.view(rows, kv_heads * 2, width // 2).transpose(0, 1)
    parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    # numbers that are not finite spoil the request they belong to; the decomposition would stop the whole tick
    gram = torch.nan_to_num(parts.transpose(1, 2) @ parts, nan=0.0, posinf=0.0, neginf=0.0)
    main = torch.linalg.eigh(gram).eigenvectors[..., -rank:]
    kept: torch.Tensor = (parts @ main) @ main.transpose(1, 2)
    return kept.transpose(0, 1).reshape(rows, kv_heads, width).to(deviation.dtype)
