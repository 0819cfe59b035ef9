"""Layers that may be taken again."""

from __future__ import annotations

from collections.abc import Sequence

from kvblend.engine.kept_layers import KeptLayers

PAYLOAD = memoryview(bytearray(b"kv"))


class Once:
    """Gives a layer once, as a loader does, and layer 1 not at all."""

    def __init__(self) -> None:
        self.left = {0: [(4, PAYLOAD)]}

    def take(self, layer: int) -> Sequence[tuple[int, memoryview]] | None:
        return self.left.pop(layer, None)


def test_a_layer_is_handed_out_again() -> None:
    kept = KeptLayers(Once())
    assert kept.take(0) == kept.take(0) == [(4, PAYLOAD)]


def test_a_layer_that_is_not_loaded_is_asked_for_again() -> None:
    source = Once()
    kept = KeptLayers(source)
    assert kept.take(1) is None
    source.left[1] = [(9, PAYLOAD)]
    assert kept.take(1) == [(9, PAYLOAD)]
