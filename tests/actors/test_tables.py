"""Layers on their way in and captured KV on its way out."""

from __future__ import annotations

import torch

from kvblend.actors.tables import RequestLayers, SideTables

PART = [(0, memoryview(b"kv"))]


def test_a_layer_is_taken_once() -> None:
    layers = RequestLayers()
    assert layers.take(0) is None
    layers.put(0, PART)
    assert layers.take(0) == PART
    assert layers.take(0) is None


def test_what_gives_a_layer_on_the_device_is_called_when_the_layer_is_taken() -> None:
    layers, calls = RequestLayers(), list[int]()

    def give() -> torch.Tensor:
        calls.append(1)
        return torch.zeros(3, dtype=torch.uint8)

    layers.put(0, [(0, PART[0][1]), (7, give)])
    assert calls == []
    taken = layers.take(0)
    assert taken is not None
    assert [start for start, _ in taken] == [0, 7]
    assert (taken[0], calls) == (PART[0], [1])
    assert isinstance(taken[1][1], torch.Tensor)


def test_load_ms_spans_from_the_start_to_the_last_layer() -> None:
    assert RequestLayers(started_s=1.0, loaded_s=1.25).load_ms == 250.0
    assert RequestLayers(started_s=1.0).load_ms == 0.0


def test_both_sides_open_the_same_layers() -> None:
    tables = SideTables()
    assert tables.open_layers("r") is tables.open_layers("r")


def test_closed_layers_are_new_when_opened_again() -> None:
    tables = SideTables()
    first = tables.open_layers("r")
    tables.close_layers("r")
    tables.close_layers("r")
    assert tables.open_layers("r") is not first


def test_dropping_captures_spares_those_of_others() -> None:
    tables = SideTables()
    tables.captured.update({("a", 0): [], ("a", 1): [], ("b", 0): []})
    tables.drop_captured("a")
    assert list(tables.captured) == [("b", 0)]
