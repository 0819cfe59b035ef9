"""What an attention backend is: selected rows at ascending, gappy positions attend to all keys up to their own."""

from __future__ import annotations

from typing import Any, Protocol

import torch

SCORED_ROWS = 64


class AttentionBackend(Protocol):
    """Attention of one sequence's rows. The mask is `key_position <= query_position`, never aligned to a corner.

    A plan depends on positions only, so one plan serves every layer.
    """

    name: str

    def prepare(self, positions: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Any:
        """A plan for rows at `positions` (int64 `[rows]` on the CPU, strictly ascending)."""
        ...

    def attend(self, plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention output `[rows, heads * head_dim]`.

        q `[rows, heads, head_dim]`; k and v `[kv_heads, keys, head_dim]` with keys > the last position, where the key
        at index j has position j. Heads share keys in neighbouring groups of `heads / kv_heads`.
        """
        ...


def reference_attention(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """The definition, in float64 and in the open: what every backend is tested against. Returns float64."""
    rows, heads, dim = q.shape
    group = heads // k.shape[0]
    keys = k.double().repeat_interleave(group, 0)
    values = v.double().repeat_interleave(group, 0)
    scores = torch.einsum("rhd,hnd->hrn", q.double(), keys) * scale
    visible = torch.arange(k.shape[1], device=q.device)[None, :] <= positions.to(q.device)[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hrn,hnd->rhd", weights, values).reshape(rows, heads * dim)


def attend_scored(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its weights seen: output `[rows, heads * dim]` and scores, float32 `[keys]`.

    A key's score is its attention summed over heads and rows, times the mean norm of its V over kv heads (the scoring
    that question-guided selection uses). The weights `[heads, rows, keys]` are materialised for 64 rows at a time.
    """
    received = torch.zeros(k.shape[1], device=q.device)
    parts = []
    for start in range(0, q.shape[0], SCORED_ROWS):
        part = positions[start : start + SCORED_ROWS]
        keys = int(part[-1]) + 1
        out, scores = _attend_scored(part, q[start : start + SCORED_ROWS], k[:, :keys], v[:, :keys], scale)
        parts.append(out)
        received[:keys] += scores
    return (parts[0] if len(parts) == 1 else torch.cat(parts)), received


def _attend_scored(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, dim = q.shape
    kv_heads, keys = k.shape[0], k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2)).float().mul_(scale).view(kv_heads, heads // kv_heads, rows, keys)
    hidden = torch.arange(keys, device=q.device)[None, :] > positions.to(q.device)[:, None]
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    out = torch.bmm(weights.view(kv_heads, -1, keys).to(v.dtype), v).view(kv_heads, heads // kv_heads, rows, dim)
    received = weights.sum((0, 1, 2)) * v.float().norm(dim=-1).mean(0)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * dim), received
