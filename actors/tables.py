"""Side tables: the tensors that messages speak of. Written on the loop; layers are taken by the device thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvblend.engine.payloads import Payload

LayerPart = memoryview | Callable[[], Payload]
"""A stored layer in host memory, or what gives it on the device: to be called in the device thread."""
LayerParts = Sequence[tuple[int, LayerPart]]
Captured = list[memoryview] | str
"""One payload per layer of a captured segment, or why it cannot be stored."""


@dataclass(slots=True, eq=False)
class RequestLayers:
    """The loaded layers of one request that are not in its KV slots yet; a LayerSource for the engine.

    A dict entry is put and taken whole, so the loop and the device thread need no lock. `taken` counts the layers that
    the device has, for the loader to know how far ahead it is.
    """

    arrived: dict[int, LayerParts] = field(default_factory=dict)
    taken: int = 0
    started_s: float = field(default_factory=time.monotonic)
    loaded_s: float = 0.0

    def put(self, layer: int, parts: LayerParts) -> None:
        """Hand over one layer: `(first position, payload or what gives it)` per segment."""
        self.arrived[layer] = parts
        self.loaded_s = time.monotonic()

    def take(self, layer: int) -> Sequence[tuple[int, Payload]] | None:
        """The layer, once; None while it is not loaded. For the device thread."""
        parts = self.arrived.pop(layer, None)
        if parts is None:
            return None
        self.taken = layer + 1
        return [(start, part() if callable(part) else part) for start, part in parts]

    @property
    def load_ms(self) -> float:
        """Milliseconds from the start of loading to the last layer that arrived."""
        return 1e3 * max(0.0, self.loaded_s - self.started_s)


class SideTables:
    """All requests' layers on their way in, and captured payloads on their way out."""

    def __init__(self) -> None:
        self.layers: dict[str, RequestLayers] = {}
        self.captured: dict[tuple[str, int], Captured] = {}

    def open_layers(self, request_id: str) -> RequestLayers:
        """The request's layers, made when first asked for."""
        return self.layers.setdefault(request_id, RequestLayers())

    def close_layers(self, request_id: str) -> None:
        """Forget the request's layers; unknown ids are ignored."""
        self.layers.pop(request_id, None)

    def drop_captured(self, request_id: str) -> None:
        """Forget what was captured for a request and never asked for."""
        for key in [key for key in self.captured if key[0] == request_id]:
            del self.captured[key]
