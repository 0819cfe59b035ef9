"""One tick on the device: sweep the layers once and, at each, pack every row that is due there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.model import Model
from kvblend.engine.observing import attend_observed, check_parity, observe_divergence, show_rows
from kvblend.engine.precision import Precision
from kvblend.engine.rope import RopeTable, rotate
from kvblend.engine.sequence import Frontier, SequenceState, Slice


@dataclass(slots=True, eq=False)
class WorkItem:
    """Rows of one sequence in one tick: at most `rows_max` new rows of its current pass, within `layers`."""

    sequence: SequenceState
    rows_max: int
    layers: range | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a tick did for one sequence. "last_row": `hidden [hidden_size]` is ready for the logits.

    "stalled": layer `layer` is not loaded yet. "running": more ticks are needed. `rows` were started or went on.
    """

    sequence: SequenceState
    status: Literal["running", "stalled", "last_row", "cancelled"]
    rows: int
    layer: int = 0
    hidden: torch.Tensor | None = None


class Step:
    """Runs ticks for one model and one attention backend."""

    def __init__(self, model: Model, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend

    @torch.inference_mode()
    def run(self, items: Sequence[WorkItem]) -> list[Outcome]:
        """Sweep layers 0..L-1 once over `items`; each goes as far as its layers are loaded and its rows are due."""
        tick = _Tick(self, [item for item in items if not item.sequence.cancelled])
        for layer in range(self.model.num_layers):
            tick.sweep(layer)
        return [tick.outcome(item) for item in items]


class _Tick:
    """The state of one sweep: which items still move, and what stopped the others."""

    def __init__(self, step: Step, items: Sequence[WorkItem]) -> None:
        self.model, self.backend = step.model, step.backend
        self.moving = list(items)
        self.stalled: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.finished: dict[int, torch.Tensor] = {}
        for item in self.moving:
            if item.sequence.slice is None:
                self._open_slice(item)
            assert item.sequence.slice is not None  # _open_slice made one
            self.rows[id(item)] = item.sequence.slice.rows.shape[0]

    def sweep(self, layer: int) -> None:
        """Everything due at `layer`: install, project, observe, write, choose; then attention and MLP, packed."""
        self.moving = [item for item in self.moving if not item.sequence.cancelled]
        due = [item for item in list(self.moving) if self._due(item, layer) and self._install(item, layer)]
        unprojected = [item for item in due if _slice(item).q is None]
        if unprojected:
            self._project(layer, unprojected)
        due = [item for item in due if self._settle_projection(item, layer)]
        if not due:
            return
        if layer == self.model.num_layers - 1:
            for item in due:
                self._keep_last_row(item)
        hidden = _packed([_slice(item).hidden for item in due])
        attended = _packed([self._attend(item, layer) for item in due])
        done = self.model.finish(layer, hidden, attended)
        for item, rows in zip(due, done.split([_slice(i).rows.shape[0] for i in due]), strict=True):
            current = _slice(item)
            current.hidden, current.q, current.layer = rows, None, layer + 1
            self._end_slice_if_done(item)

    def outcome(self, item: WorkItem) -> Outcome:
        """What became of `item` in this tick."""
        sequence, key = item.sequence, id(item)
        rows = self.rows.get(key, 0)
        if sequence.cancelled:
            return Outcome(sequence, "cancelled", rows)
        if key in self.finished:
            return Outcome(sequence, "last_row", rows, hidden=self.finished[key])
        if key in self.stalled:
            return Outcome(sequence, "stalled", rows, layer=self.stalled[key])
        return Outcome(sequence, "running", rows)

    def _due(self, item: WorkItem, layer: int) -> bool:
        current = item.sequence.slice
        inside = item.layers is None or layer in item.layers
        return current is not None and current.layer == layer and inside

    def _install(self, item: WorkItem, layer: int) -> bool:
        """Put a loaded layer's keys (rotated to their positions) and values into the sequence's slots, once."""
        sequence = item.sequence
        if sequence.installed > layer:
            return True
        loaded = sequence.source.take(layer) if sequence.source is not None else None
        if loaded is None:
            self.stalled[id(item)] = layer
            self.moving.remove(item)
            return False
        stored = sequence.precision or Precision.of_model(self.model)
        for start, payload in loaded:
            end = sequence.end_of(start)
            sequence.note_sensitivity(start, stored.sensitivity(payload, end - start))
            slots_k, slots_v = sequence.slab.view(layer, end)
            slots = slots_k[:, start:], slots_v[:, start:]
            turn = self._rope(sequence, layer).span(start, end)
            stored.decode_into(payload, end - start, slots, turn)
            if (echo := stored.echo(payload, end - start)) is not None:
                stored.decode_rows_into(echo, end - start, slots, turn, sequence.repeats.of(start))
        sequence.installed = layer + 1
        return True

    def _project(self, layer: int, items: list[WorkItem]) -> None:
        slices = [_slice(item) for item in items]
        sizes = [part.rows.shape[0] for part in slices]
        q, k, v = self.model.project(layer, _packed([part.hidden for part in slices]))
        turns = [self._turn(item, layer) for item in items]
        cos, sin = _packed([cos for cos, _ in turns]), _packed([sin for _, sin in turns])
        rotated_q, rotated_k = rotate(q, cos, sin), rotate(k, cos, sin)
        parts = zip(rotated_q.split(sizes), k.split(sizes), rotated_k.split(sizes), v.split(sizes), strict=True)
        for item, current, (part_q, part_raw, part_k, part_v) in zip(items, slices, parts, strict=True):
            current.q = part_q
            sequence = item.sequence
            if sequence.capture is not None:
                sequence.capture.record(layer, current.rows, part_raw, part_v)
            self._observe(sequence, current, layer, part_raw, part_k, part_v)
            sequence.charges.cached_row_layers += current.cached_rows
            sequence.charges.question_row_layers += current.question_rows
            sequence.slab.write(layer, current.rows, current.rows_device, part_k, part_v)

    def _observe(
        self, sequence: SequenceState, current: Slice, layer: int, raw: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Everything that compares fresh with cached, before the slots are overwritten."""
        running = sequence.current
        decoding = sequence.num_computed_tokens >= sequence.num_prompt_tokens
        if running is None or decoding or not sequence.context.cached_rows.numel():
            return
        if layer == 0:
            check_parity(sequence, current, k)
        if running.observe == "divergence" and layer == running.layers.stop - 1:
            observe_divergence(sequence, current, layer, k, v)
        if running.residual is not None:
            running.residual.correct(sequence.slab, layer, current.rows, raw, v, self._rope(sequence, layer))

    def _settle_projection(self, item: WorkItem, layer: int) -> bool:
        """End a pass that stops at the projection, if this is its layer. True when attention at `layer` is due."""
        sequence = item.sequence
        assert sequence.current is not None  # a moving item has a pass
        if sequence.current.stop == "qkv" and layer == sequence.current.layers.stop - 1:
            self._end_slice(item)
            following = sequence.slice
            return following is not None and following.layer == layer and following.q is not None
        return True

    def _keep_last_row(self, item: WorkItem) -> None:
        """Behind the last layer a slice's shown rows and its last can matter: the others have written their K and V."""
        current, running = _slice(item), item.sequence.current
        if running is None or running.observe == "attention":
            return
        shown = 0 if running.shows_from is None else int((current.rows >= running.shows_from).sum())
        first = current.rows.shape[0] - max(1, shown)
        if first == 0:
            return
        if current.q is not None:
            current.q = current.q[first:]
        current.hidden, current.rows = current.hidden[first:], current.rows[first:]
        current.rows_device = current.rows_device[first:]
        current.plans = {}

    def _attend(self, item: WorkItem, layer: int) -> torch.Tensor:
        sequence, current = item.sequence, _slice(item)
        assert sequence.current is not None  # a moving item has a pass
        assert current.q is not None  # projected just now
        running = sequence.current
        if running.observe == "attention" and (running.score_layers is None or layer in running.score_layers):
            window = self.model.config.window_of(layer, int(current.rows[-1]))
            return attend_observed(sequence, current, current.q, self.backend, layer, self.model.scale, window)
        k, v = sequence.slab.view(layer, int(current.rows[-1]) + 1)
        return self.backend.attend(self._plan(current, layer), current.q, k, v, self.model.scale)

    def _plan(self, current: Slice, layer: int) -> Any:
        """The attention plan of the slice's rows; layers with the same window share one."""
        window = self.model.config.window_of(layer, int(current.rows[-1]))
        if window not in current.plans:
            current.plans[window] = self.backend.prepare(current.rows, self.model.device, self.model.dtype, window)
        return current.plans[window]

    def _rope(self, sequence: SequenceState, layer: int) -> RopeTable:
        """The rotation of one layer: that of the sequence's prompt, looked up once."""
        if sequence.ropes is None:
            sequence.ropes = self.model.ropes.tables(sequence.num_prompt_tokens, sequence.slab.capacity)
        return sequence.ropes[self.model.config.windowed(layer)]

    def _turn(self, item: WorkItem, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[rows, 1, dim]` of the slice's rows at one layer."""
        current, windowed = _slice(item), self.model.config.windowed(layer)
        if windowed not in current.turns:
            cos, sin = self._rope(item.sequence, layer).gather(current.rows_device)
            current.turns[windowed] = cos[:, None], sin[:, None]
        return current.turns[windowed]

    def _end_slice_if_done(self, item: WorkItem) -> None:
        sequence = item.sequence
        assert sequence.current is not None  # a moving item has a pass
        if _slice(item).layer == sequence.current.layers.stop:
            self._end_slice(item)

    def _end_slice(self, item: WorkItem) -> None:
        """Store the slice's outputs; open the next slice of the pass, or the first one of the next pass."""
        sequence = item.sequence
        current = _slice(item)
        sequence.partial.append(Frontier(current.layer, current.rows, current.hidden, current.q))
        sequence.slice = None
        assert sequence.current is not None  # a moving item has a pass
        if sequence.rows_started < sequence.current.rows.shape[0]:
            self.moving.remove(item)
            return
        if sequence.current.shows_from is not None:
            show_rows(sequence, self.model)
        sequence.end_pass()
        if sequence.current is None:
            self.finished[id(item)] = sequence.last_hidden()
            sequence.frontier = None
            self.moving.remove(item)
            return
        if sequence.current.layers.start == 0:
            self.moving.remove(item)
            return
        self._open_slice(item)

    def _open_slice(self, item: WorkItem) -> None:
        sequence = item.sequence
        running = sequence.current
        assert running is not None  # the scheduler plans unfinished sequences only
        # a residual is learnt from all rows of its pass at once
        rows_max = max(1, item.rows_max) if running.residual is None else running.rows.shape[0]
        rows = running.rows[sequence.rows_started : sequence.rows_started + rows_max]
        sequence.rows_started += rows.shape[0]
        device = self.model.device
        start, q = running.layers.start, None
        if start == 0:
            hidden = self.model.embed(sequence.token_ids[rows].to(device))
        else:
            frontier = sequence.frontier
            assert frontier is not None  # SequenceState checked that passes follow one another
            where = torch.searchsorted(frontier.rows, rows).to(device)
            hidden = frontier.hidden.index_select(0, where)
            q = frontier.q.index_select(0, where) if frontier.q is not None else None
        rows_device = rows.to(device)
        sequence.slice = Slice(rows, rows_device, start, hidden, q)
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            sequence.slice.cached_rows = int(torch.isin(rows, sequence.context.cached_rows).sum())
            sequence.slice.question_rows = int((rows >= sequence.context.question_rows[0]).sum())


def _slice(item: WorkItem) -> Slice:
    current = item.sequence.slice
    assert current is not None  # only items with a running slice are due
    return current


def _packed(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
