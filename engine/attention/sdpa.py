"""Attention on torch's own scaled_dot_product_attention: tiles of rows, keys trimmed to each tile's last position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvblend.engine.attention.base import first_key, visible_keys

TILE_ROWS_SCATTERED = 64
TILE_ROWS_DENSE = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `start..end-1` of the call attend to keys `first..keys-1`; `mask` True marks what they see of them."""

    start: int
    end: int
    first: int
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """`causal`: the rows are positions 0..rows-1, the case with a kernel of its own. Else tiles."""

    rows: int
    causal: bool
    tiles: tuple[Tile, ...]


class SdpaBackend:
    """The backend for CPUs, and the fall-back elsewhere; needs nothing but torch."""

    name = "sdpa"

    def __init__(self, tile_rows: int | None = None) -> None:
        self._tile_rows = tile_rows

    def prepare(
        self, positions: torch.Tensor, device: torch.device, dtype: torch.dtype, window: int | None = None
    ) -> SdpaPlan:
        """Cut ascending positions into tiles. Scattered rows get small tiles: a tile's keys end at its last row.

        With a window they start where the window of its first row does.
        """
        rows = positions.shape[0]
        first, last = int(positions[0]), int(positions[-1])
        if window is not None and last < window:
            window = None
        if first == 0 and last == rows - 1 and rows > 1 and window is None:
            return SdpaPlan(rows, True, ())
        if rows == 1:
            return SdpaPlan(1, False, (Tile(0, 1, first_key(last, window), last + 1, None),))
        dense = last - first < 2 * rows
        size = self._tile_rows or (TILE_ROWS_DENSE if dense else TILE_ROWS_SCATTERED)
        tiles = []
        for start in range(0, rows, size):
            part = positions[start : start + size]
            seen, keys = first_key(int(part[0]), window), int(part[-1]) + 1
            mask = visible_keys(part.to(device), seen, keys, window)
            tiles.append(Tile(start, start + part.shape[0], seen, keys, mask))
        return SdpaPlan(rows, False, tuple(tiles))

    def attend(self, plan: SdpaPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention output `[rows, heads * head_dim]`; see AttentionBackend.attend for the inputs."""
        rows, heads, dim = q.shape
        queries, keys, values = q.transpose(0, 1)[None], k[None], v[None]
        grouped = heads != k.shape[0]
        if plan.causal:
            out = F.scaled_dot_product_attention(
                queries, keys[:, :, :rows], values[:, :, :rows], is_causal=True, scale=scale, enable_gqa=grouped
            )
            return out[0].transpose(0, 1).reshape(rows, heads * dim)
        result = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
        for tile in plan.tiles:
            out = F.scaled_dot_product_attention(
                queries[:, :, tile.start : tile.end],
                keys[:, :, tile.first : tile.keys],
                values[:, :, tile.first : tile.keys],
                attn_mask=tile.mask,
                scale=scale,
                enable_gqa=grouped,
            )
            result[tile.start : tile.end] = out[0].transpose(0, 1)
        return result.view(rows, heads * dim)
