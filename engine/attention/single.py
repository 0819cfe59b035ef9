"""Attention of one row that sees every key it is given: what a decoding sequence computes in each layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention output `[1, kv_heads, group, head_dim]` of one row, without a mask.

    q `[1, kv_heads, group, head_dim]`: the heads that share a kv head stand as rows over the same keys, so K and V are
    read once and never repeated. k and v `[1, kv_heads, keys, head_dim]` hold what the row sees and nothing else.
    """
    return F.scaled_dot_product_attention(q, k, v, scale=scale)
