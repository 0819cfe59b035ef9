"""What an attention backend is: selected rows at ascending, gappy positions attend to all keys up to their own."""

from __future__ import annotations

from typing import Any, Protocol

import torch

SCORED_ROWS = 64


class AttentionBackend(Protocol):
    """Attention of one sequence's rows. The mask is `key_position <= query_position`, never aligned to a corner.

    With a window it is `query_position - window < key_position <= query_position`, and keys that no row of a group of
    rows can see are not read. A plan depends on positions and window only, so one plan serves every layer of a window.
    """

    name: str

    def prepare(
        self, positions: torch.Tensor, device: torch.device, dtype: torch.dtype, window: int | None = None
    ) -> Any:
        """A plan for rows at `positions` (int64 `[rows]` on the CPU, strictly ascending). None: no window."""
        ...

    def attend(self, plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention output `[rows, heads * head_dim]`.

        q `[rows, heads, head_dim]`; k and v `[kv_heads, keys, head_dim]` with keys > the last position, where the key
        at index j has position j. Heads share keys in neighbouring groups of `heads / kv_heads`.
        """
        ...


def visible_keys(positions: torch.Tensor, first: int, end: int, window: int | None) -> torch.Tensor:
    """bool `[rows, end - first]`, on the device of `positions`: which keys `first..end-1` each row sees."""
    keys = torch.arange(first, end, device=positions.device)[None, :]
    seen = keys <= positions[:, None]
    return seen if window is None else seen.logical_and_(keys > positions[:, None] - window)


def first_key(first_position: int, window: int | None) -> int:
    """The first key that a row at `first_position`, or any row behind it, can see."""
    return 0 if window is None else max(0, first_position - window + 1)


def reference_attention(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The definition, in float64 and in the open: what every backend is tested against. Returns float64."""
    rows, heads, dim = q.shape
    group = heads // k.shape[0]
    keys = k.double().repeat_interleave(group, 0)
    values = v.double().repeat_interleave(group, 0)
    scores = torch.einsum("rhd,hnd->hrn", q.double(), keys) * scale
    rows_at, keys_at = positions.to(q.device)[:, None], torch.arange(k.shape[1], device=q.device)[None, :]
    hidden = keys_at > rows_at
    if window is not None:
        hidden = hidden | (keys_at <= rows_at - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hrn,hnd->rhd", weights, values).reshape(rows, heads * dim)


def attend_scored(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its weights seen: output `[rows, heads * dim]` and scores, float32 `[keys]`.

    A key's score is its attention summed over heads and rows, times the mean norm of its V over kv heads (the scoring
    that question-guided selection uses). The weights `[heads, rows, keys]` are materialised for 64 rows at a time.
    """
    received = torch.zeros(k.shape[1], device=q.device)
    parts = []
    for start in range(0, q.shape[0], SCORED_ROWS):
        part = positions[start : start + SCORED_ROWS]
        first, end = first_key(int(part[0]), window), int(part[-1]) + 1
        # every row sees the keys before the first row's, and a window hides some at the front
        seen_by_all = int(part[0]) + 1 if window is None else first
        visible = visible_keys(part.to(q.device), seen_by_all, end, window)
        out, scores = _attend_scored(visible, q[start : start + SCORED_ROWS], k[:, first:end], v[:, first:end], scale)
        parts.append(out)
        received[first:end] += scores
    return (parts[0] if len(parts) == 1 else torch.cat(parts)), received


def _attend_scored(
    visible: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`visible` bool `[rows, last keys]` is for the last of the keys; those before them are seen by every row."""
    rows, heads, dim = q.shape
    kv_heads, keys = k.shape[0], k.shape[1]
    group, masked = heads // kv_heads, visible.shape[1]
    grouped = q.reshape(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2)).float().mul_(scale).view(kv_heads, group, rows, keys)
    if masked:
        scores[..., keys - masked :].masked_fill_(~visible, -torch.inf)
    # in place: at a long context the weights are several times larger than all keys and values
    weights = torch.softmax(scores, -1, out=scores)
    out = torch.bmm(weights.view(kv_heads, -1, keys).to(v.dtype), v).view(kv_heads, group, rows, dim)
    received = weights.view(-1, keys).sum(0) * v.float().norm(dim=-1).mean(0)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * dim), received
