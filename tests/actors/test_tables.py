"""Layers on their way in and captured KV on its way out."""

from __future__ import annotations

from kvblend.actors.tables import RequestLayers, SideTables

PART = [(0, memoryview(b"kv"))]


def test_a_layer_is_taken_once() -> None:
    layers = RequestLayers()
    assert layers.take(0) is None
    layers.put(0, PART)
    assert layers.take(0) == PART
    assert layers.take(0) is None


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
