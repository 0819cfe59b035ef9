"""Attention on xformers' memory-efficient kernels (CUDA): groups of rows with a dense additive bias, GQA folded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvblend.engine.attention.base import first_key, visible_keys

GROUP_ROWS = 256
# the cutlass operator wants every stride of the bias but the last to be a multiple of 8 elements
BIAS_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Group:
    """Rows `start..end-1` attend to keys `first..keys-1` under `bias [rows, those keys]` (0 or -inf)."""

    start: int
    end: int
    first: int
    keys: int
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups of one call and its number of rows."""

    rows: int
    groups: tuple[Group, ...]


def build_bias(
    positions: torch.Tensor,
    keys: int,
    device: torch.device,
    dtype: torch.dtype,
    first: int = 0,
    window: int | None = None,
) -> torch.Tensor:
    """Additive mask `[rows, keys - first]` for keys `first..keys-1`: 0 where a row sees the key, else -inf.

    A view into a wider tensor whose row stride is a multiple of 8, as the kernel requires.
    """
    count = keys - first
    padded = -(-count // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    wide = torch.zeros((positions.shape[0], padded), dtype=dtype, device=device)
    visible = visible_keys(positions.to(device), first, first + padded, window)
    return wide.masked_fill_(~visible, -torch.inf)[:, :count]


class XformersBackend:
    """Grouped dense-bias attention. `attention` is `xformers.ops.memory_efficient_attention` or a stand-in for it."""

    name = "xformers"

    def __init__(self, attention: Callable[..., torch.Tensor], group_rows: int = GROUP_ROWS) -> None:
        self._attention = attention
        self._group_rows = group_rows

    def prepare(
        self, positions: torch.Tensor, device: torch.device, dtype: torch.dtype, window: int | None = None
    ) -> GroupPlan:
        """Cut ascending positions into groups; the bias has the queries' dtype."""
        groups = []
        for start in range(0, positions.shape[0], self._group_rows):
            part = positions[start : start + self._group_rows]
            keys = int(part[-1]) + 1
            # whole blocks of keys: the kernel wants its pointers aligned
            first = first_key(int(part[0]), window) // BIAS_ALIGNMENT * BIAS_ALIGNMENT
            bias = build_bias(part, keys, device, dtype, first, window)
            groups.append(Group(start, start + part.shape[0], first, keys, bias))
        return GroupPlan(positions.shape[0], tuple(groups))

    def attend(self, plan: GroupPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention output `[rows, heads * head_dim]`.

        The heads that share a kv head are folded into rows: exact, and K and V are never repeated.
        """
        rows, heads, dim = q.shape
        kv_heads = k.shape[0]
        fold = heads // kv_heads
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        result = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
        for group in plan.groups:
            count = group.end - group.start
            part = q[group.start : group.end].view(count, kv_heads, fold, dim)
            folded = part.permute(2, 0, 1, 3).reshape(1, fold * count, kv_heads, dim)
            bias = repeat_rows(group.bias, fold)[None, None].expand(1, kv_heads, fold * count, -1)
            out = self._attention(
                folded.contiguous(),
                keys[:, group.first : group.keys],
                values[:, group.first : group.keys],
                attn_bias=bias,
                scale=scale,
            )
            unfolded = out.view(fold, count, kv_heads, dim).permute(1, 2, 0, 3)
            result[group.start : group.end] = unfolded.reshape(count, heads, dim)
        return result.view(rows, heads * dim)


def repeat_rows(bias: torch.Tensor, times: int) -> torch.Tensor:
    """`bias [rows, keys]` stacked `times` times, keeping the padded row stride."""
    padded = bias.stride(0)
    wide = bias.as_strided((bias.shape[0], padded), (padded, 1))
    return wide.repeat(times, 1)[:, : bias.shape[1]]


def probe_xformers(device: torch.device, dtype: torch.dtype) -> tuple[XformersBackend | None, str]:
    """The backend if xformers works on this device, else None; and a line that says which and why."""
    if device.type != "cuda":
        return None, f"xformers has no operator for device {device.type!r}"
    try:
        ops: Any = importlib.import_module("xformers.ops")
        backend = XformersBackend(ops.memory_efficient_attention)
        positions = torch.tensor([1, 3])
        q = torch.zeros((2, 2, 64), dtype=dtype, device=device)
        kv = torch.zeros((1, 4, 64), dtype=dtype, device=device)
        backend.attend(backend.prepare(positions, device, dtype), q, kv, kv, 0.125)
    except (ImportError, OSError, RuntimeError, ValueError, NotImplementedError) as error:
        return None, f"xformers refuses: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return backend, "xformers memory_efficient_attention with grouped dense bias"
