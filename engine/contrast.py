"""Two captures of one chunk, computed behind different texts, made one: the mean of both, and what differs.

What two contexts agree on will likely hold in a third one. The mean carries less of either text than each alone, and
where they differ tells which tokens depend on what stands before them (docs/quality.md, "Two contexts").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvblend.engine.capture import payload_tensors, tensor_bytes

WARM_SHARE = 0.65


def contrast(
    warm: Sequence[memoryview],
    plain: Sequence[memoryview],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    share: float = WARM_SHARE,
    echo: Sequence[memoryview] | None = None,
) -> list[memoryview]:
    """One payload per layer: `share` of the KV behind the longer text and the rest of that behind the shorter one.

    Behind K and V stands the tokens' sensitivity, float32 `[tokens]`: the squared change of K between the two, in
    units of the chunk's mean squared K, plus the same of V. Behind that stands the KV of `echo` as it is, where given:
    the chunk computed behind a copy of itself (`engine.repeats`). ValueError where the captures differ in shape.
    """
    captures = [warm, plain] if echo is None else [warm, plain, echo]
    if len({tuple(map(len, layers)) for layers in captures}) > 1:
        raise ValueError("the captures of one chunk must have the same layers and sizes")
    layers = []
    for index, (one, other) in enumerate(zip(warm, plain, strict=True)):
        behind = torch.stack(payload_tensors(one, kv_heads, head_dim, dtype))
        alone = torch.stack(payload_tensors(other, kv_heads, head_dim, dtype))
        mixed = torch.lerp(alone, behind, share)
        change = (behind - alone).float().square().sum((1, 3))
        size = mixed.float().square().sum((1, 3)).mean(1, keepdim=True)
        sensitivity = (change / size.clamp_min(torch.finfo(torch.float32).tiny)).sum(0)
        parts = [mixed.contiguous().view(torch.uint8).flatten(), sensitivity.view(torch.uint8)]
        if echo is not None:
            parts.append(torch.frombuffer(echo[index], dtype=torch.uint8))
        layers.append(tensor_bytes(torch.cat(parts)))
    return layers
