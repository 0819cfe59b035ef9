"""How much prefill work goes into a step that running answers wait for, from what steps took so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvblend.actors.core.entry import Entry
from kvblend.actors.core.events import ItemResult, StepItem
from kvblend.actors.core.progress import Outlook
from kvblend.actors.core.speeds import TOKENS_TINY, Mean
from kvblend.engine.layout import Reuse

WEIGHT = 0.3
"""What a new sample counts against all before it."""
MARGIN = 0.15
"""The share of the bound that is left for what was estimated too low."""
PROGRESS_MIN = 0.1
"""The share of the bound that prefills get where decoding takes nearly all of it."""
BEYOND = 0.25
"""Prefills get this much of what decoding takes where the bound cannot be kept even without them."""
LAYERS_PER_STEP = (4, 5, 6, 7, 8)
"""A long prompt is cut into slices that go so many layers per step: later rows see more keys and may be slower."""
SLACK = 0.25
"""So much of a layer a slice is smaller than what fits, so that it takes as many steps though times vary."""
ROWS_MIN = 32
"""Fewer rows than these take no less time: a layer's weights are read all the same."""


@dataclass(slots=True)
class Room:
    """What is left of one step: milliseconds (None: no bound) and rows. `begun`: some prefill is in it."""

    ms: float | None
    rows: int
    begun: bool = False


class Pace:
    """Times of steps: what decoding takes by the number of rows, and what a row-layer of a prefill takes on top.

    What every step takes is part of decoding; steps without it have a fixed part, which tiny prompts teach.
    """

    def __init__(self, itl_ms_max: float | None, num_layers: int) -> None:
        self.itl_ms_max = itl_ms_max
        self._num_layers = num_layers
        # a slice ends with a step, however much would still fit into it: the fewer layers are left over the better
        self._layers = SLACK + min(LAYERS_PER_STEP, key=lambda layers: -num_layers % layers)
        self._decode_ms: dict[int, float] = {}
        self._row_layer_ms: dict[bool, Mean] = {}
        self._fixed_ms = Mean(WEIGHT)

    def decode_ms(self, rows: int) -> float:
        """What a step of this many decoding rows takes alone; that of fewer where it is not known, 0 at first."""
        known = max((count for count in self._decode_ms if count <= rows), default=None)
        if known is None:
            known = min(self._decode_ms, default=0)
        return self._decode_ms.get(known, 0.0) if rows else 0.0

    def row_layer_ms(self, entry: Entry) -> float | None:
        """What a row-layer of this prompt takes: as lately, else as of others of its kind, else as of any.

        None where nothing is known.
        """
        if entry.progress.row_layer_ms is not None:
            return entry.progress.row_layer_ms
        return self._kind_ms(blends(entry))

    def _kind_ms(self, blend: bool) -> float | None:
        known = {kind: mean.value for kind, mean in self._row_layer_ms.items() if mean.value is not None}
        return known.get(blend, max(known.values(), default=None))

    def _base_ms(self, decoding: int) -> float:
        """What a step takes before anything of a prompt is computed."""
        return self.decode_ms(decoding) if decoding else self._fixed_ms.value or 0.0

    def note(self, decoding: int, prefills: Sequence[tuple[Entry, ItemResult]], step_ms: float) -> None:
        """A step with so many decoding rows and these prefills took `step_ms` of the device."""
        work = sum(result.row_layers for _, result in prefills)
        if step_ms <= 0.0:
            return
        if not prefills and decoding:
            before = self._decode_ms.get(decoding, step_ms)
            self._decode_ms[decoding] = (1.0 - WEIGHT) * before + WEIGHT * step_ms
        if not work:
            return
        tiny = all(self._is_tiny(entry) for entry, _ in prefills)
        if tiny and not decoding:
            speeds = [(self._kind_ms(blends(entry)) or 0.0) * result.row_layers for entry, result in prefills]
            self._fixed_ms.note(max(0.0, step_ms - sum(speeds)))
        sample = max(0.05 * step_ms, step_ms - (0.0 if tiny and not decoding else self._base_ms(decoding))) / work
        for entry, result in prefills:
            if result.row_layers < ROWS_MIN:
                continue
            entry.progress.note_speed(sample)
            self._row_layer_ms.setdefault(blends(entry), Mean(WEIGHT)).note(sample, tiny=tiny)

    def _is_tiny(self, entry: Entry) -> bool:
        """Whether there is so little to compute of it that a step takes most of its time for other things."""
        if entry.decision is None:
            return False
        work = Outlook.of(entry.job, entry.decision, self._num_layers).row_layers
        return work < TOKENS_TINY * self._num_layers

    def room(self, decoding: int, rows_max: int, bounded: bool) -> Room:
        """What prefills may take of a step with so many decoding rows. `bounded`: somebody waits for the step's end."""
        rows = max(1, rows_max - decoding)
        if self.itl_ms_max is None or not bounded:
            return Room(None, rows)
        decode_ms, least_ms = self._base_ms(decoding), PROGRESS_MIN * self.itl_ms_max
        if decode_ms + least_ms > self.itl_ms_max:
            return Room(BEYOND * decode_ms, rows)
        return Room(max((1.0 - MARGIN) * self.itl_ms_max - decode_ms, least_ms), rows)

    def cut(self, entry: Entry, room: Room) -> StepItem | None:
        """What of this prompt goes into the step; taken from `room`. The step's first goes on by a layer at least."""
        speed = self.row_layer_ms(entry)
        if room.rows <= 0:
            return None
        if room.ms is None or speed is None or entry.decision is None:
            rows = min(room.rows, entry.job.layout.num_tokens)
            room.rows, room.begun = room.rows - rows, True
            return StepItem(entry.request_id, rows)
        work = room.ms / speed
        progress, outlook = entry.progress, Outlook.of(entry.job, entry.decision, self._num_layers)
        # a slice that is on its way keeps its rows; a new one has so many that some layers of it fit
        fitting = max(ROWS_MIN, work / self._layers)
        rows = progress.rows or int(min(outlook.rows_left(progress.row_layers), room.rows, fitting))
        layers = int(min(work // max(rows, ROWS_MIN), self._num_layers))
        if layers < 1 and room.begun:
            return None
        layers = max(1, layers)
        given = max(1, min(room.rows, max(rows, min(ROWS_MIN, entry.job.layout.num_tokens))))
        room.ms = max(0.0, room.ms - layers * max(rows, ROWS_MIN) * speed)
        room.rows, room.begun = room.rows - given, True
        return StepItem(entry.request_id, given, layers if layers < self._num_layers else None)


def blends(entry: Entry) -> bool:
    """Whether rows of this prompt are scattered between stored ones: they take longer than neighbours."""
    return entry.decision is not None and entry.decision.plan.count(Reuse.CACHED) > 0
