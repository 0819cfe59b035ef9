"""Which layers are read next and for whom, delivered in order, within a window that all requests share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis.strategies import integers, randoms

from kvblend.actors.core.loading import (
    AHEAD_LAYERS,
    RUN_LAYERS_MAX,
    DeliverLayer,
    LoadCommand,
    LoadingState,
    Rank,
    ReadRun,
)


def reads(commands: list[LoadCommand]) -> list[ReadRun]:
    return [command for command in commands if isinstance(command, ReadRun)]


def places(commands: list[LoadCommand]) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(run.load, run.segments, run.first, run.stop) for run in reads(commands)]


def delivered(commands: list[LoadCommand]) -> list[tuple[str, int]]:
    return [(command.load, command.layer) for command in commands if isinstance(command, DeliverLayer)]


def missing(*segments: int, layers: int = 5) -> dict[int, set[int]]:
    return {segment: set(range(layers)) for segment in segments}


def test_a_layer_of_every_segment_comes_before_the_next_layer() -> None:
    state = LoadingState(num_layers=5, window=3)
    assert places(state.open("r", missing(4, 2), Rank())) == [("r", (4,), 0, 1), ("r", (2,), 0, 1), ("r", (4, 2), 1, 2)]


def test_a_layer_that_may_be_waited_for_is_shared_out_among_all_reads_of_the_window() -> None:
    state = LoadingState(num_layers=5, window=4)
    runs = places(state.open("r", missing(*range(6)), Rank()))
    assert runs == [("r", (0, 1), 0, 1), ("r", (2, 3), 0, 1), ("r", (4,), 0, 1), ("r", (5,), 0, 1)]


def test_a_load_that_is_ahead_reads_whole_layers_and_leaves_half_of_the_window() -> None:
    state = LoadingState(num_layers=20, window=4)
    out, given, ahead = reads(state.open("r", missing(*range(6), layers=20), Rank())), 0, []
    while out:
        commands = state.read_done(out.pop(0).number)
        given += len(delivered(commands))
        out += reads(commands)
        if 2 < given < 20:
            ahead += reads(commands)
            assert state.in_flight <= 2
    assert {len(run.segments) for run in ahead} == {6}


def test_a_layer_is_delivered_when_its_last_segment_is_there() -> None:
    state = LoadingState(num_layers=5, window=2)
    first, second = reads(state.open("r", missing(0, 1), Rank()))
    assert delivered(state.read_done(second.number)) == []
    assert delivered(state.read_done(first.number)) == [("r", 0)]


def test_a_layer_that_comes_early_waits_for_those_before_it() -> None:
    state = LoadingState(num_layers=3, window=3)
    runs = reads(state.open("r", missing(0, layers=3), Rank()))
    assert delivered(state.read_done(runs[1].number)) == []
    assert delivered(state.read_done(runs[0].number)) == [("r", 0), ("r", 1)]


def test_what_is_in_memory_is_delivered_at_once() -> None:
    state = LoadingState(num_layers=3, window=1)
    commands = state.open("r", {0: set(), 1: {2}}, Rank())
    assert (delivered(commands), places(commands)) == ([("r", 0), ("r", 1)], [("r", (1,), 2, 3)])


def test_the_window_is_one_for_all_requests() -> None:
    state = LoadingState(num_layers=5, window=2)
    (first, _) = reads(state.open("a", missing(0), Rank(arrival=1)))
    assert state.open("b", missing(0), Rank(arrival=2)) == []
    assert state.in_flight == 2
    assert len(reads(state.read_done(first.number))) == 1


def test_the_earlier_deadline_is_read_first_then_the_earlier_arrival() -> None:
    state = LoadingState(num_layers=1, window=1)
    (run,) = reads(state.open("first", missing(0, layers=1), Rank(arrival=1)))
    for name, rank in (("late", Rank(arrival=2)), ("later", Rank(arrival=3)), ("urgent", Rank(5.0, 4))):
        state.open(name, missing(0, layers=1), rank)
    order = []
    while following := reads(state.read_done(run.number)):
        (run,) = following
        order.append(run.load)
    assert order == ["urgent", "late", "later"]


def test_a_load_that_is_well_ahead_of_its_computing_lets_others_go_first() -> None:
    state = LoadingState(num_layers=20, window=1)
    (run,) = reads(state.open("ahead", missing(0, layers=20), Rank(1.0, 1)))
    state.open("behind", missing(0, layers=20), Rank(2.0, 2))
    order = []
    for _ in range(2 * AHEAD_LAYERS):
        order.append(run.load)
        (run,) = reads(state.read_done(run.number))
    assert order == ["ahead"] * AHEAD_LAYERS + ["behind"] * AHEAD_LAYERS


def test_a_load_goes_first_again_when_its_layers_are_taken() -> None:
    state = LoadingState(num_layers=20, window=1)
    (run,) = reads(state.open("a", missing(0, layers=20), Rank(1.0, 1)))
    state.open("b", missing(0, layers=20), Rank(2.0, 2))
    for _ in range(AHEAD_LAYERS + 1):
        (run,) = reads(state.read_done(run.number))
    assert run.load == "b"
    state.note_taken("a", AHEAD_LAYERS)
    assert places(state.read_done(run.number))[0][0] == "a"


def test_looking_ahead_reads_the_first_layers_behind_everybody_else_and_delivers_nothing() -> None:
    state = LoadingState(num_layers=6, window=1)
    (run,) = reads(state.open("running", missing(0, layers=2) | {1: set()}, Rank(arrival=2)))
    assert state.open("queued", missing(0, layers=6), Rank(arrival=1), layers=2) == []
    order, out = [], []
    while following := reads(commands := state.read_done(run.number)):
        (run,) = following
        order.append((run.load, run.first))
        out += delivered(commands)
    assert order == [("running", 1), ("queued", 0), ("queued", 1)]
    assert {name for name, _ in [*out, *delivered(commands)]} == {"running"}


def test_runs_grow_with_what_the_device_has_not_taken_yet_and_shrink_when_it_catches_up() -> None:
    state = LoadingState(num_layers=60, window=1)
    (run,) = reads(state.open("r", missing(0, layers=60), Rank()))
    lengths = []
    while run.stop < 40:
        (run,) = reads(state.read_done(run.number))
        lengths.append(run.stop - run.first)
    assert lengths[0] == 1
    assert lengths[-1] == RUN_LAYERS_MAX
    assert lengths == sorted(lengths)
    state.note_taken("r", run.stop)
    (run,) = reads(state.read_done(run.number))
    assert run.stop - run.first == 1


def test_a_run_ends_before_a_layer_that_is_in_memory() -> None:
    state = LoadingState(num_layers=30, window=1)
    gone = {0: set(range(30)) - {12}}
    (run,) = reads(state.open("r", gone, Rank()))
    spans = []
    while following := reads(state.read_done(run.number)):
        (run,) = following
        spans.append((run.first, run.stop))
    assert all(not first <= 12 < stop for first, stop in spans)
    assert any(stop == 12 for _, stop in spans)


def test_reads_of_a_closed_load_take_no_place_in_the_window() -> None:
    state = LoadingState(num_layers=5, window=2)
    state.open("gone", missing(0), Rank(arrival=1))
    state.open("waiting", missing(0), Rank(arrival=2))
    assert [run.load for run in reads(state.close("gone"))] == ["waiting", "waiting"]


def test_a_disk_that_hangs_is_not_asked_for_ever_more() -> None:
    state = LoadingState(num_layers=5, window=2)
    count = 0
    for turn in range(10):
        count += len(reads(state.open(f"r{turn}", missing(0), Rank(arrival=turn))))
        state.close(f"r{turn}")
    assert count == 4


def test_a_read_of_a_closed_load_delivers_nothing_and_lets_others_read() -> None:
    state = LoadingState(num_layers=5, window=1)
    runs = reads(state.open("a", missing(0), Rank()))
    state.close("a")
    runs += reads(state.open("b", missing(0), Rank()))
    state.close("b")
    assert state.open("c", missing(0), Rank()) == []
    assert [run.load for run in reads(state.read_done(runs[0].number))] == ["c"]


def test_closing_what_is_unknown_does_nothing() -> None:
    assert LoadingState(1, 1).close("r") == []


def test_a_request_loads_once_at_a_time() -> None:
    state = LoadingState(1, 1)
    state.open("r", missing(0, layers=1), Rank())
    with pytest.raises(ValueError, match="loading already"):
        state.open("r", missing(0, layers=1), Rank())


def test_a_read_nobody_asked_for_is_ignored() -> None:
    state = LoadingState(2, 1)
    state.open("r", missing(0, layers=2), Rank())
    assert state.read_done(99) == []


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LoadingState(*sizes)


class Disk:
    """Reads that are out, and what every load has been given; checks each command as it comes."""

    def __init__(self, num_layers: int, window: int) -> None:
        self.state = LoadingState(num_layers, window)
        self.num_layers, self.window = num_layers, window
        self.out: dict[int, ReadRun] = {}
        self.wanted: dict[str, dict[int, set[int]]] = {}
        self.ahead: set[str] = set()
        self.given: dict[str, int] = {}
        self.closed: set[str] = set()

    def take(self, commands: list[LoadCommand]) -> None:
        for command in commands:
            assert command.load not in self.closed, "something is done for a closed load"
            if isinstance(command, DeliverLayer):
                assert command.load not in self.ahead
                assert command.layer == self.given[command.load], "out of order, or twice"
                rows = range(command.layer + 1)
                assert not any(gone & set(rows) for gone in self.wanted[command.load].values()), "not read yet"
                self.given[command.load] += 1
            else:
                assert len(set(command.segments)) == len(command.segments) > 0
                for segment in command.segments:
                    self._check_span(command, segment)
                self.out[command.number] = command
        live = sum(run.load not in self.closed for run in self.out.values())
        assert live == self.state.in_flight <= self.window
        assert len(self.out) <= 2 * self.window

    def _check_span(self, run: ReadRun, segment: int) -> None:
        span = set(range(run.first, run.stop))
        assert span <= self.wanted[run.load][segment], "read without need"
        busy = [other for other in self.out.values() if other.load == run.load and segment in other.segments]
        assert not any(span & set(range(other.first, other.stop)) for other in busy), "read twice"

    def open(self, name: str, chance: random.Random) -> None:
        layers = range(self.num_layers)
        self.wanted[name] = {s: {k for k in layers if chance.random() < 0.8} for s in range(chance.randint(1, 4))}
        self.given[name] = 0
        ahead = chance.random() < 0.2
        if ahead:
            self.ahead.add(name)
        rank = Rank(chance.choice((1.0, 2.0, float("inf"))), len(self.wanted))
        self.take(self.state.open(name, self.wanted[name], rank, 2 if ahead else None))

    def finish(self, number: int) -> None:
        run = self.out.pop(number)
        for segment in run.segments:
            self.wanted[run.load][segment] -= set(range(run.first, run.stop))
        self.take(self.state.read_done(number))

    def close(self, name: str) -> None:
        # what the close sets free is read for others
        self.closed.add(name)
        self.take(self.state.close(name))


@given(integers(1, 12), integers(1, 5), integers(1, 60), randoms(use_true_random=False))
def test_whatever_happens_layers_come_in_order_once_and_reads_stay_in_their_window(
    num_layers: int, window: int, moves: int, chance: random.Random
) -> None:
    disk = Disk(num_layers, window)
    for turn in range(moves):
        move = chance.random()
        if move < 0.2:
            disk.open(f"r{turn}", chance)
        elif move < 0.3 and disk.wanted:
            disk.close(chance.choice(sorted(disk.wanted)))
        elif move < 0.5 and disk.given:
            name = chance.choice(sorted(disk.given))
            disk.state.note_taken(name, chance.randint(0, disk.given[name]))
        elif disk.out:
            disk.finish(chance.choice(sorted(disk.out)))
    while disk.out:
        disk.finish(chance.choice(sorted(disk.out)))
    for name in set(disk.wanted) - disk.closed:
        assert disk.given[name] == (0 if name in disk.ahead else num_layers)
        disk.close(name)
    assert (disk.state.active, disk.state.in_flight) == (0, 0)
