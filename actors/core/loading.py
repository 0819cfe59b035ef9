"""The loader's pure core: which layers of which chunk are read next, for whom first, and when a layer is complete."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

AHEAD_LAYERS = 4
"""A load this many layers ahead of its computing lets others go first."""
RUN_LAYERS_MAX = 8
"""How many layers one disk operation brings at most."""


class Rank(NamedTuple):
    """Whose reads go first: the earlier deadline (monotonic seconds, infinite for none), then the earlier arrival."""

    deadline_s: float = math.inf
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Read layers `first..stop-1` of some segments' chunks, in one operation. No two reads have the same number."""

    number: int
    load: str
    segments: tuple[int, ...]
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class DeliverLayer:
    """All segments of this layer are in memory: hand it to the blender. Layers of one load come in order."""

    load: str
    layer: int


LoadCommand = ReadRun | DeliverLayer


@dataclass(slots=True, eq=False)
class _Load:
    """`unread[k]` are the segments whose layer k nobody reads yet; `left[k]` counts those not in memory."""

    rank: Rank
    delivers: bool
    unread: list[list[int]]
    left: list[int]
    cursor: int = 0
    next_delivery: int = 0
    taken: int = 0
    reading: set[int] = field(default_factory=set)

    @property
    def ahead(self) -> int:
        """Layers that are delivered and that the device has not taken."""
        return self.next_delivery - self.taken


class LoadingState:
    """At most `window` reads are in flight over all loads. Of a load that was closed nothing more is read.

    Loads that the device waits for, or soon will, go first; then those that are well ahead; then loads that only look
    ahead for a request in the queue. Within each: by `Rank`. Within a load: by layer, then in the order of segments.
    Reads of closed loads take no place in the window, up to as many again: a disk that hangs must not be asked for ever
    more.
    """

    def __init__(self, num_layers: int, window: int) -> None:
        if num_layers < 1 or window < 1:
            raise ValueError(f"num_layers {num_layers} and window {window} must be at least 1")
        self.num_layers = num_layers
        self.window = window
        self._loads: dict[str, _Load] = {}
        self._reads: dict[int, ReadRun] = {}
        self._live = 0
        self._count = 0

    @property
    def active(self) -> int:
        """Loads that are open."""
        return len(self._loads)

    @property
    def in_flight(self) -> int:
        """Reads that are out for open loads."""
        return self._live

    def open(
        self, load: str, missing: Mapping[int, Collection[int]], rank: Rank, layers: int | None = None
    ) -> list[LoadCommand]:
        """Begin: `missing[segment]` are its layers that are not in memory; a segment without any is named too.

        With `layers` only the first ones are read, after everybody else's, and none is delivered: that is looking
        ahead. Raises ValueError where the load is open already.
        """
        if load in self._loads:
            raise ValueError(f"{load} is loading already")
        stop = self.num_layers if layers is None else min(layers, self.num_layers)
        unread = [[s for s, gone in missing.items() if k in gone and k < stop] for k in range(self.num_layers)]
        left = [sum(k in gone for gone in missing.values()) for k in range(self.num_layers)]
        self._loads[load] = _Load(rank, layers is None, unread, left)
        return self._deliver(load) + self._read_more()

    def read_done(self, number: int) -> list[LoadCommand]:
        """A read came back, well or not: deliver what is complete and next in order, read on."""
        run = self._reads.pop(number, None)
        if run is None:
            return []
        load = self._loads.get(run.load)
        if load is None or number not in load.reading:
            return self._read_more()
        load.reading.discard(number)
        self._live -= 1
        for layer in range(run.first, run.stop):
            load.left[layer] -= len(run.segments)
        return self._deliver(run.load) + self._read_more()

    def note_taken(self, load: str, layers: int) -> None:
        """The device has taken this many layers of a load. Unknown loads are ignored."""
        if load in self._loads:
            self._loads[load].taken = max(self._loads[load].taken, layers)

    def close(self, load: str) -> list[LoadCommand]:
        """End a load, done or not: what is queued is never read, what is in flight is nobody's. Idempotent."""
        gone = self._loads.pop(load, None)
        if gone is None:
            return []
        self._live -= len(gone.reading)
        return self._read_more()

    def _deliver(self, name: str) -> list[LoadCommand]:
        load, commands = self._loads[name], list[LoadCommand]()
        while load.delivers and load.next_delivery < self.num_layers and not load.left[load.next_delivery]:
            commands.append(DeliverLayer(name, load.next_delivery))
            load.next_delivery += 1
        return commands

    def _read_more(self) -> list[LoadCommand]:
        commands: list[LoadCommand] = []
        while self._live < self.window and len(self._reads) < 2 * self.window:
            waiting = [(self._turn(load), name) for name, load in self._loads.items() if self._wants_more(load)]
            if not waiting:
                break
            name = min(waiting)[1]
            load = self._loads[name]
            self._count += 1
            run = self._take_run(name, load)
            self._reads[run.number] = run
            load.reading.add(run.number)
            self._live += 1
            commands.append(run)
        return commands

    def _wants_more(self, load: _Load) -> bool:
        """Move to the first layer of which something is unread; False where there is none, or enough is under way."""
        while load.cursor < self.num_layers and not load.unread[load.cursor]:
            load.cursor += 1
        return load.cursor < self.num_layers and len(load.reading) < self._lanes(load)

    def _lanes(self, load: _Load) -> int:
        """How many reads of a load may be out: all while the device may be waiting for one, then half of them.

        Reads that are out share the disk: the fewer there are the sooner the first of them is done.
        """
        return self.window if load.ahead < 1 else max(1, self.window // 2)

    def _turn(self, load: _Load) -> tuple[int, Rank]:
        if not load.delivers:
            return 2, load.rank
        return int(load.cursor - load.taken >= AHEAD_LAYERS), load.rank

    def _take_run(self, name: str, load: _Load) -> ReadRun:
        """The next layer's segments, shared out among the reads that may be out; the whole of it, and more layers, the
        further the device is behind.
        """
        first, waiting = load.cursor, load.unread[load.cursor]
        free = min(self._lanes(load) - len(load.reading), self.window - self._live)
        segments = waiting[: len(waiting) if load.ahead > 1 else math.ceil(len(waiting) / free)]
        stop, longest = first + 1, max(1, min(RUN_LAYERS_MAX, load.ahead // 2))
        while stop < min(first + longest, self.num_layers) and set(segments) <= set(load.unread[stop]):
            stop += 1
        for layer in range(first, stop):
            load.unread[layer] = [segment for segment in load.unread[layer] if segment not in segments]
        return ReadRun(self._count, name, tuple(segments), first, stop)
