"""Rotary position embedding in the half-split convention, with tables of the model's own frequencies."""

from __future__ import annotations

from collections import OrderedDict

import torch

from kvblend.engine.config import ModelConfig, RopeConfig

TABLES_MAX = 4
LENGTH_MIN = 2048


class RopeTable:
    """cos and sin for positions 0 to `length - 1`: two tensors `[length, rotary_dim]`.

    sin's first half is negated, so that a rotation is `x * cos + swap_halves(x) * sin`. Angles are computed in float64
    and rounded once: all positions are equally exact. Both carry the magnitude that some scalings ask for.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rope: RopeConfig | None = None,
        num_tokens: int = 0,
        length: int | None = None,
    ) -> None:
        rope = rope or config.rope
        self.length = config.context_length if length is None else length
        frequencies = torch.tensor(rope.inverse_frequencies(config.head_dim, num_tokens), dtype=torch.float64)
        # transformers keeps the frequencies in float32; the same rounding keeps far positions in step with it
        frequencies = frequencies.to(torch.float32).to(torch.float64)
        angles = torch.arange(self.length, dtype=torch.float64)[:, None] * frequencies
        # one table serves every dtype: narrow dtypes are rotated in float32 and rounded at the end
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = (angles.cos() * rope.magnitude).to(table_dtype), (angles.sin() * rope.magnitude).to(table_dtype)
        self.cos = torch.cat((cos, cos), dim=1).to(device)
        self.sin = torch.cat((-sin, sin), dim=1).to(device)
        self._shrink = rope.magnitude**-2

    def gather(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[rows, rotary_dim]` at `positions` (int64 `[rows]`)."""
        return self.cos[positions], self.sin[positions]

    def gather_inverse(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `gather`, for the rotation that undoes it: backwards, and by the inverse of the magnitude."""
        cos, sin = self.gather(positions)
        if self._shrink == 1.0:
            return cos, -sin
        return cos * self._shrink, sin * -self._shrink

    def span(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin views `[end - start, rotary_dim]` of neighbouring positions; nothing is copied."""
        return self.cos[start:end], self.sin[start:end]


class RopeBook:
    """The tables of one model, built when they are first needed.

    Where RoPE depends on length (dynamic, longrope), the length of the *prompt* decides, once per sequence: fresh rows,
    re-rotated cached rows and generated rows all use that table. transformers decides anew at every forward pass, so a
    full pass over the prompt is the same there, and an answer that crosses `original_context` is not.

    At most four tables are kept, least recently used ones go first; one that is too short is replaced by one of
    twice the length or more, up to the context length.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._tables: OrderedDict[tuple[RopeConfig, str], RopeTable] = OrderedDict()

    def tables(self, num_tokens: int, length: int) -> tuple[RopeTable, RopeTable]:
        """For a prompt of `num_tokens` and positions below `length`: tables of plain and of windowed layers."""
        plain = self._table(self._config.rope, num_tokens, length)
        if self._config.rope_local is None:
            return plain, plain
        return plain, self._table(self._config.rope_local, num_tokens, length)

    def _table(self, rope: RopeConfig, num_tokens: int, length: int) -> RopeTable:
        key = (rope, rope.regime(num_tokens))
        table = self._tables.get(key)
        if table is None or table.length < length:
            rounded = max(LENGTH_MIN, 1 << (length - 1).bit_length())
            rounded = max(length, min(rounded, self._config.context_length))
            table = RopeTable(self._config, self._dtype, self._device, rope=rope, num_tokens=num_tokens, length=rounded)
            self._tables[key] = table
        self._tables.move_to_end(key)
        while len(self._tables) > TABLES_MAX:
            self._tables.popitem(last=False)
        return table


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading `cos.shape[-1]` numbers of each head of `x [..., head_dim]`; the result has x's dtype.

    The tables broadcast against x. What is behind the rotated numbers stays as it is.
    """
    width = cos.shape[-1]
    if width != x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    half = width // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def rotate_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Write the rotation of `x [..., head_dim]` into `out` (same shape) without a full-sized temporary of it."""
    width = cos.shape[-1]
    if width != x.shape[-1]:
        out[..., width:].copy_(x[..., width:])
        out, x = out[..., :width], x[..., :width]
    if out.dtype != cos.dtype or x.dtype != cos.dtype:
        out.copy_(rotate(x, cos, sin))
        return
    half = width // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])


def add_rotated(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Add the rotation of `x [..., head_dim]` to `out` (same shape), without a temporary where dtypes agree."""
    width = cos.shape[-1]
    if width != x.shape[-1]:
        out[..., width:].add_(x[..., width:])
        out, x = out[..., :width], x[..., :width]
    if out.dtype != cos.dtype or x.dtype != cos.dtype:
        out.add_(rotate(x, cos, sin))
        return
    half = width // 2
    out.addcmul_(x, cos)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
