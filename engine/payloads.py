"""The bytes of stored layers: in host memory, or in a block of device memory that holds a whole chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Payload = memoryview | torch.Tensor
"""One stored layer: its bytes in host memory, or a uint8 tensor `[bytes]` on any device."""
ALIGN_BYTES = 256
"""Each layer of a block begins at a multiple of this, so that every dtype in it is aligned."""


class LayerSource(Protocol):
    """Where the cached layers of one request come from."""

    def take(self, layer: int) -> Sequence[tuple[int, Payload]] | None:
        """`(first position, payload)` per cached segment once the layer is loaded, else None. Called in layer order."""
        ...


def payload_numbers(payload: Payload, dtype: torch.dtype, count: int = -1, offset: int = 0) -> torch.Tensor:
    """`count` numbers (-1: all) from byte `offset` on: a flat view of the payload, where that lies."""
    if not isinstance(payload, torch.Tensor):
        return torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
    stop = len(payload) if count < 0 else offset + count * dtype.itemsize
    return payload[offset:stop].view(dtype)


def block_bytes(num_layers: int, layer_bytes: int) -> int:
    """What a `DeviceBlock` for such layers takes."""
    return num_layers * (-(-layer_bytes // ALIGN_BYTES) * ALIGN_BYTES)


def free_memory_bytes(device: torch.device) -> int | None:
    """What is free of a CUDA device's memory now; None for a device that has none of its own."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


class DeviceBlock:
    """Room for all layers of one chunk, in their stored form, in one piece of device memory.

    The memory is taken, and each layer copied into it, when a layer is first asked for. `fill` and `layer` belong to
    the device thread. All else is for any thread: a layer that is there stays there.
    """

    def __init__(self, num_layers: int, layer_bytes: int, device: torch.device) -> None:
        self.layer_bytes = layer_bytes
        self.num_bytes = block_bytes(num_layers, layer_bytes)
        self.failed = False
        """The device had no memory left for it."""
        self._device = device
        self._rows: torch.Tensor | None = None
        self._filled = [False] * num_layers
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether every layer is there."""
        return all(self._filled)

    def has(self, layer: int) -> bool:
        """Whether a layer is there."""
        return self._filled[layer]

    def close(self) -> None:
        """Take no more layers in; those that are there stay as long as somebody has the block."""
        self._closed = True

    def layer(self, layer: int) -> torch.Tensor:
        """A layer that is there: uint8 `[layer_bytes]`. Nobody may write to it. ValueError where it is not there."""
        if self._rows is None or not self._filled[layer]:
            raise ValueError(f"layer {layer} is not on the device")
        return self._rows[layer, : self.layer_bytes]

    @torch.inference_mode()
    def fill(self, layer: int, payload: Payload) -> Payload:
        """A layer on the device, copied from `payload` if it is not there; `payload` where there is no room for it.

        Raises ValueError for a payload of another length.
        """
        if len(payload) != self.layer_bytes:
            raise ValueError(f"layer {layer} has {len(payload)} bytes; those of this chunk have {self.layer_bytes}")
        if not self._filled[layer]:
            if self._closed or not self._make_room():
                return payload
            assert self._rows is not None  # there is room
            self._rows[layer, : self.layer_bytes].copy_(payload_numbers(payload, torch.uint8))
            self._filled[layer] = True
        return self.layer(layer)

    def _make_room(self) -> bool:
        """Take the block's memory, once; a device without so much must not fail the request."""
        if self._rows is None and not self.failed:
            shape = (len(self._filled), self.num_bytes // len(self._filled))
            try:
                self._rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                self.failed = True
        return not self.failed
