"""Rotary position embedding in the half-split convention, with tables of the model's own frequencies."""

from __future__ import annotations

import torch

from kvblend.engine.config import ModelConfig


class RopeTable:
    """cos and sin for every position of the context: two tensors `[context_length, head_dim]`.

    sin's first half is negated, so that a rotation is `x * cos + swap_halves(x) * sin`. Angles are computed in float64
    and rounded once: position 0 to context_length - 1 are equally exact.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float64)
        # transformers keeps the frequencies in float32; the same rounding keeps far positions in step with it
        frequencies = frequencies.to(torch.float32).to(torch.float64)
        angles = torch.arange(config.context_length, dtype=torch.float64)[:, None] * frequencies
        # one table serves every dtype: narrow dtypes are rotated in float32 and rounded at the end
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
        self.cos = torch.cat((cos, cos), dim=1).to(device)
        self.sin = torch.cat((-sin, sin), dim=1).to(device)

    def gather(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[rows, head_dim]` at `positions` (int64 `[rows]`)."""
        return self.cos[positions], self.sin[positions]

    def span(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin views `[end - start, head_dim]` of neighbouring positions; nothing is copied."""
        return self.cos[start:end], self.sin[start:end]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x [..., head_dim]` by tables that broadcast against it; the result has x's dtype."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def rotate_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Write the rotation of `x [..., head_dim]` into `out` (same shape) without a full-sized temporary of it."""
    if out.dtype != cos.dtype or x.dtype != cos.dtype:
        out.copy_(rotate(x, cos, sin))
        return
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
