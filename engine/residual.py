"""Residual correction: cached rows that are not computed again are moved by what was seen on those that are.

Per layer and kv head, in the un-rotated frame, learnt from nothing but the request itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvblend.engine.kv import KVSlab
from kvblend.engine.rope import RopeTable, rotate

ResidualKind = Literal["mean", "distance", "ridge"]
RESIDUALS: tuple[ResidualKind, ...] = ("mean", "distance", "ridge")
DISTANCE_TOKENS = 32.0
RIDGE_PENALTY = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Chosen and other cached rows, with the index of the chunk each belongs to (int64 tensors)."""

    chosen: torch.Tensor
    chosen_chunk: torch.Tensor
    others: torch.Tensor
    others_chunk: torch.Tensor


class Residual:
    """Adds `fraction` of the change that a chunk's chosen rows show to its other rows, K and V alike.

    "mean": the chunk's mean change. "distance": its chosen rows weighted by exp(-|distance| / 32). "ridge": the chunk's
    mean change, plus one linear map per head from a row's cached [K, V] to its change, fitted on all chosen rows
    around their chunk's mean with penalty 10 times the mean squared feature. A chunk without chosen rows takes the mean
    of all.
    """

    def __init__(
        self, kind: ResidualKind, fraction: float, cached_spans: tuple[tuple[int, int], ...], chosen: torch.Tensor
    ) -> None:
        if kind not in RESIDUALS:
            raise ValueError(f"residual is {kind!r}; choose {', '.join(RESIDUALS)}")
        self.kind = kind
        self.fraction = fraction
        starts = torch.tensor([start for start, _ in cached_spans], dtype=torch.int64)
        cached = torch.cat([torch.arange(start, end) for start, end in cached_spans])
        others = cached[~torch.isin(cached, chosen)]

        def chunk_of(rows: torch.Tensor) -> torch.Tensor:
            return torch.searchsorted(starts, rows, right=True) - 1

        self._rows = _Rows(chosen, chunk_of(chosen), others, chunk_of(others))
        self._count = len(cached_spans)
        self._weights = self._distance_weights() if kind == "distance" else self._mean_weights()

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
        at, device = self._rows, raw_k.device
        if not at.others.numel() or not at.chosen.numel():
            return
        where = torch.searchsorted(rows, at.chosen).to(device)
        chosen, others = at.chosen.to(device), at.others.to(device)
        old = self._read(slab, layer, chosen, rope)
        change = torch.cat((raw_k[where], v[where]), dim=-1) - old
        weights = self._weights.to(device, change.dtype)
        kv_heads, width = change.shape[1], change.shape[2]
        moved = (weights @ change.reshape(change.shape[0], -1)).view(-1, kv_heads, width)
        if self.kind == "distance":
            moved = moved.view(-1, kv_heads, width)
        else:
            mean_change, moved = moved, moved[at.others_chunk.to(device)]
        if self.kind == "ridge":
            moved = moved + self._ridge(slab, layer, old, change, mean_change, weights, rope)
        moved = moved * self.fraction
        half = width // 2
        cos, sin = rope.gather(others)
        delta_k = rotate(moved[..., :half], cos[:, None], sin[:, None])
        slab.k[layer].index_add_(1, others, delta_k.transpose(0, 1).to(slab.k.dtype))
        slab.v[layer].index_add_(1, others, moved[..., half:].transpose(0, 1).to(slab.v.dtype))

    def _ridge(
        self,
        slab: KVSlab,
        layer: int,
        old: torch.Tensor,
        change: torch.Tensor,
        mean_change: torch.Tensor,
        weights: torch.Tensor,
        rope: RopeTable,
    ) -> torch.Tensor:
        """The linear part for the other rows `[others, kv_heads, 2 * head_dim]`."""
        at, device = self._rows, old.device
        chunk, others_chunk = at.chosen_chunk.to(device), at.others_chunk.to(device)
        centre = (weights @ old.reshape(old.shape[0], -1)).view(-1, *old.shape[1:])
        x = (old - centre[chunk]).transpose(0, 1).float()
        y = (change - mean_change[chunk]).transpose(0, 1).float()
        gram = x.transpose(1, 2) @ x
        # the squared length of an average row, ten times over: about as strong as ten more rows
        penalty = RIDGE_PENALTY * x.square().sum((1, 2)) / x.shape[1]
        gram.diagonal(dim1=1, dim2=2).add_(penalty[:, None].clamp_min(1e-12))
        solved: torch.Tensor = torch.linalg.solve(gram, x.transpose(1, 2) @ y)
        features = self._read(slab, layer, at.others.to(device), rope) - centre[others_chunk]
        return torch.bmm(features.transpose(0, 1).float(), solved).transpose(0, 1).to(change.dtype)

    def _read(self, slab: KVSlab, layer: int, rows: torch.Tensor, rope: RopeTable) -> torch.Tensor:
        """Cached [K un-rotated, V] of `rows`: `[rows, kv_heads, 2 * head_dim]`."""
        cos, sin = rope.gather_inverse(rows)
        k = slab.k[layer].index_select(1, rows).transpose(0, 1)
        v = slab.v[layer].index_select(1, rows).transpose(0, 1)
        return torch.cat((rotate(k, cos[:, None], sin[:, None]), v), dim=-1)

    def _mean_weights(self) -> torch.Tensor:
        """`[chunks, chosen]`: averages the chosen rows of each chunk, of all where it has none."""
        member = torch.arange(self._count)[:, None] == self._rows.chosen_chunk[None, :]
        member[~member.any(1)] = True
        return member.float() / member.sum(1, keepdim=True)

    def _distance_weights(self) -> torch.Tensor:
        """`[others, chosen]`: weights of a row's own chunk's chosen rows by distance; its chunk's mean has the rest."""
        at = self._rows
        near = torch.exp(-(at.others[:, None] - at.chosen[None, :]).abs().float() / DISTANCE_TOKENS)
        same = at.others_chunk[:, None] == at.chosen_chunk[None, :]
        same[~same.any(1)] = True
        near = near.masked_fill(~same, 0.0)
        total = near.sum(1, keepdim=True)
        mean = same.float() / same.sum(1, keepdim=True)
        # far from every chosen row the mean of the chunk is all that is known
        return torch.where(total > 1e-6, near / total.clamp_min(1e-6), mean)
