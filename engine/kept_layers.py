"""A LayerSource that hands out its layers more than once: for a sequence that may start again from what was loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvblend.engine.payloads import LayerSource, Payload


class KeptLayers:
    """Keeps every layer's payloads (views, no copies) until it is dropped, which a sequence does behind its prompt."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self._taken: dict[int, Sequence[tuple[int, Payload]]] = {}

    def take(self, layer: int) -> Sequence[tuple[int, Payload]] | None:
        """The layer as it was loaded, however often; None while it is not."""
        if layer not in self._taken:
            loaded = self._source.take(layer)
            if loaded is None:
                return None
            self._taken[layer] = loaded
        return self._taken[layer]
