"""Which layers are read ahead, delivered in order, and when a load is over."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis.strategies import integers, randoms

from kvblend.actors.core.loading import CloseLoad, DeliverLayer, LoadCommand, LoadingState, ReadLayer


def layers(commands: list[LoadCommand], kind: type[ReadLayer] | type[DeliverLayer]) -> list[int]:
    return [command.layer for command in commands if isinstance(command, kind)]


def test_a_window_of_layers_is_read_ahead() -> None:
    state = LoadingState(num_layers=5, window=2)
    assert layers(state.start("r"), ReadLayer) == [0, 1]
    assert layers(state.layer_read("r", 0), ReadLayer) == [2]


def test_a_layer_that_comes_early_waits_for_those_before_it() -> None:
    state = LoadingState(num_layers=3, window=3)
    state.start("r")
    assert layers(state.layer_read("r", 1), DeliverLayer) == []
    assert layers(state.layer_read("r", 0), DeliverLayer) == [0, 1]


def test_a_quiet_load_closes_at_once() -> None:
    state = LoadingState(num_layers=1, window=1)
    state.start("r")
    state.layer_read("r", 0)
    assert state.close("r") == [CloseLoad("r")]
    assert state.active == 0


def test_a_load_closes_with_its_last_read_and_delivers_nothing_more() -> None:
    state = LoadingState(num_layers=3, window=2)
    state.start("r")
    assert state.close("r") == []
    assert state.layer_read("r", 0) == []
    assert state.layer_read("r", 1) == [CloseLoad("r")]


def test_closing_what_is_unknown_closes_it() -> None:
    assert LoadingState(1, 1).close("r") == [CloseLoad("r")]


def test_a_request_loads_once_at_a_time() -> None:
    state = LoadingState(1, 1)
    state.start("r")
    with pytest.raises(ValueError, match="loading already"):
        state.start("r")


def test_a_read_nobody_asked_for_is_ignored() -> None:
    state = LoadingState(2, 1)
    state.start("r")
    assert state.layer_read("r", 1) == []
    assert state.layer_read("x", 0) == []


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LoadingState(*sizes)


@given(integers(1, 12), integers(1, 5), integers(0, 30), randoms(use_true_random=False))
def test_whatever_the_order_of_reads_layers_come_in_order_and_the_load_closes_once(
    num_layers: int, window: int, close_after: int, chance: random.Random
) -> None:
    state = LoadingState(num_layers, window)
    reading, delivered, closed, moves = list(layers(state.start("r"), ReadLayer)), [], 0, 0
    while reading:
        assert len(reading) <= window
        if moves == close_after:
            closed += len(state.close("r"))
        commands = state.layer_read("r", reading.pop(chance.randrange(len(reading))))
        reading += layers(commands, ReadLayer)
        delivered += layers(commands, DeliverLayer)
        closed += sum(isinstance(command, CloseLoad) for command in commands)
        moves += 1
    if moves <= close_after:
        closed += len(state.close("r"))
        assert delivered == list(range(num_layers))
    assert delivered == list(range(len(delivered)))
    assert (closed, state.active) == (1, 0)
