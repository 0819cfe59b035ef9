"""Exact KV on its way to the store: un-rotated K and V of whole segments, copied while they are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvblend.engine.payloads import Payload, payload_numbers

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Capture:
    """Host copies of some spans' KV: per span and layer one payload, K `[kv_heads, tokens, head_dim]` then V."""

    def __init__(
        self, spans: Sequence[tuple[int, int]], num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.spans = tuple(spans)
        # a mark per layer and row, not a count: a second pass over the same rows must not pass for the missing ones
        self._seen = [torch.zeros((num_layers, end - start), dtype=torch.bool) for start, end in spans]
        self._buffers = [
            torch.empty((num_layers, 2, kv_heads, end - start, head_dim), dtype=dtype) for start, end in spans
        ]

    def record(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy what of `rows` (ascending positions, CPU) lies in the spans. k, v `[rows, kv_heads, head_dim]`."""
        for index, (start, end) in enumerate(self.spans):
            low, high = torch.searchsorted(rows, torch.tensor([start, end])).tolist()
            if low == high:
                continue
            first = int(rows[low]) - start
            if int(rows[high - 1]) - start - first != high - low - 1:
                raise ValueError("only whole stretches can be captured, these rows have gaps")
            target = self._buffers[index][layer]
            target[0, :, first : first + high - low] = k[low:high].transpose(0, 1)
            target[1, :, first : first + high - low] = v[low:high].transpose(0, 1)
            self._seen[index][layer, first : first + high - low] = True

    def complete(self, index: int) -> bool:
        """Whether every row of span `index` has been seen in every layer."""
        return bool(self._seen[index].all())

    def payloads(self, index: int) -> list[memoryview]:
        """The finished payloads of span `index`, one per layer; views of the captured memory."""
        if not self.complete(index):
            missing = int((~self._seen[index]).any(0).sum())
            raise ValueError(f"span {self.spans[index]} is not complete: {missing} rows are missing")
        return [tensor_bytes(layer) for layer in self._buffers[index]]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def payload_tensors(
    payload: Payload, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[kv_heads, tokens, head_dim]` of one stored layer; views of the payload.

    Without `tokens` the payload must hold nothing else.
    """
    count = -1 if tokens < 0 else 2 * kv_heads * tokens * head_dim
    both = payload_numbers(payload, dtype, count).view(2, kv_heads, -1, head_dim)
    return both[0], both[1]


def payload_sensitivity(
    payload: memoryview, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int
) -> torch.Tensor | None:
    """What stands behind K and V of one stored layer, float32 `[tokens]` (see `engine.contrast`), if anything."""
    offset = 2 * kv_heads * tokens * head_dim * dtype.itemsize
    if len(payload) == offset:
        return None
    return torch.frombuffer(payload, dtype=torch.float32, offset=offset, count=tokens)
