"""One tick on the device: sweep the layers once and, at each, pack every row that is due there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.decoding import DecodeRows, is_decode_row
from kvblend.engine.installing import install_layer, rope_of
from kvblend.engine.model import Model
from kvblend.engine.observing import attend_observed, check_parity, observe_divergence, show_rows
from kvblend.engine.rope import rotate
from kvblend.engine.sequence import Frontier, SequenceState, Slice
from kvblend.engine.slices import keep_shown, open_slice


@dataclass(slots=True, eq=False)
class WorkItem:
    """Rows of one sequence in one tick: at most `rows_max` new rows of a pass, at most `layers_max` layers further.

    The layers count from where the sequence stands, over all passes it goes through; behind them it leaves the sweep
    and goes on at that very layer in a later tick. None: as far as it can. A slice that is on its way keeps its rows.
    """

    sequence: SequenceState
    rows_max: int
    layers_max: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a tick did for one sequence. "last_row": `hidden [hidden_size]` is ready for the logits.

    "stalled": layer `layer` is not loaded yet. "running": more ticks are needed. `rows` were started or went on;
    `row_layers` counts the rows whose K and V were computed and written, layer by layer.
    """

    sequence: SequenceState
    status: Literal["running", "stalled", "last_row", "cancelled"]
    rows: int
    layer: int = 0
    hidden: torch.Tensor | None = None
    row_layers: int = 0


class Step:
    """Runs ticks for one model and one attention backend."""

    def __init__(self, model: Model, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend

    @torch.inference_mode()
    def run(self, items: Sequence[WorkItem]) -> list[Outcome]:
        """Sweep layers 0..L-1 once over `items`; each goes as far as its layers are loaded and its rows are due."""
        movers = [_Mover(item) for item in items]
        tick = _Tick(self, [mover for mover in movers if not mover.sequence.cancelled])
        for layer in range(self.model.num_layers):
            tick.sweep(layer)
        tick.end_decoding()
        return [mover.outcome() for mover in movers]


class _Mover:
    """One item in a sweep: how far it may still go, and what stopped it."""

    def __init__(self, item: WorkItem) -> None:
        self.item, self.sequence = item, item.sequence
        self.layers_left = self.sequence.num_layers if item.layers_max is None else max(1, item.layers_max)
        self.rows = self.row_layers = 0
        self.stalled_at: int | None = None
        self.hidden: torch.Tensor | None = None

    @property
    def slice(self) -> Slice:
        """The slice on its way; an item that moves has one."""
        current = self.sequence.slice
        assert current is not None
        return current

    def outcome(self) -> Outcome:
        """What became of the item in this tick."""
        status: Literal["running", "stalled", "last_row", "cancelled"] = "running"
        if self.sequence.cancelled:
            status = "cancelled"
        elif self.hidden is not None:
            status = "last_row"
        elif self.stalled_at is not None:
            status = "stalled"
        hidden = self.hidden if status == "last_row" else None
        return Outcome(self.sequence, status, self.rows, self.stalled_at or 0, hidden, self.row_layers)


class _Tick:
    """The state of one sweep: rows behind their prompts go through it as one, slices join and leave at their layers."""

    def __init__(self, step: Step, movers: Sequence[_Mover]) -> None:
        self.model, self.backend = step.model, step.backend
        self.decoding: list[_Mover] = []
        self.moving: list[_Mover] = []
        for mover in movers:
            whole = is_decode_row(mover.sequence, mover.item.layers_max)
            (self.decoding if whole else self.moving).append(mover)
        self.decode = DecodeRows(self.model, [m.sequence for m in self.decoding]) if self.decoding else None
        for mover in self.decoding:
            mover.rows, mover.row_layers = 1, self.model.num_layers
        for mover in self.moving:
            if mover.sequence.slice is None:
                open_slice(self.model, mover.sequence, mover.item.rows_max)
            mover.rows = mover.slice.rows.shape[0]

    def sweep(self, layer: int) -> None:
        """Everything due at `layer`: project, install, observe, write, choose; then attention and MLP, packed."""
        self.moving = [mover for mover in self.moving if not mover.sequence.cancelled]
        due = [mover for mover in self.moving if self._due(mover, layer)]
        # what the rows' own projection takes may still go by before the stored part is loaded
        decode_q = self._project(layer, [mover for mover in due if mover.slice.q is None])
        due = [mover for mover in due if self._install(mover, layer)]
        for mover in due:
            self._take_in(mover, layer)
        due = [mover for mover in due if self._settle_projection(mover, layer)]
        if layer == self.model.num_layers - 1:
            for mover in due:
                keep_shown(mover.sequence, mover.slice)
        hidden = [mover.slice.hidden for mover in due]
        attended = [self._attend(mover, layer) for mover in due]
        if self.decode is not None and decode_q is not None:
            hidden.insert(0, self.decode.hidden)
            attended.insert(0, self.decode.attend(layer, decode_q))
        if not hidden:
            return
        done = _split(self.model.finish(layer, _packed(hidden), _packed(attended)), [part.shape[0] for part in hidden])
        if self.decode is not None:
            self.decode.hidden = done.pop(0)
        for mover, rows in zip(due, done, strict=True):
            current = mover.slice
            current.hidden, current.q, current.layer = rows, None, layer + 1
            self._end_slice_if_done(mover)

    def end_decoding(self) -> None:
        """The rows behind their prompts have been through every layer."""
        if self.decode is not None:
            for mover, hidden in zip(self.decoding, self.decode.end(), strict=True):
                mover.hidden = hidden

    def _due(self, mover: _Mover, layer: int) -> bool:
        current = mover.sequence.slice
        return current is not None and current.layer == layer and mover.layers_left > 0

    def _install(self, mover: _Mover, layer: int) -> bool:
        """Make the stored part of `layer` ready for attention; False, and out of the sweep, where it is not loaded."""
        if install_layer(self.model, mover.sequence, layer):
            return True
        mover.stalled_at = layer
        self.moving.remove(mover)
        return False

    def _project(self, layer: int, movers: list[_Mover]) -> torch.Tensor | None:
        """Q, K and V of every row that has none yet. Rows behind their prompts: K and V are written, q is returned."""
        hidden = [mover.slice.hidden for mover in movers]
        turns = [self._turn(mover, layer) for mover in movers]
        if self.decode is not None:
            hidden.insert(0, self.decode.hidden)
            turns.insert(0, self.decode.turns(layer))
        if not hidden:
            return None
        q, k, v = self.model.project(layer, _packed(hidden))
        cos, sin = _packed([cos for cos, _ in turns]), _packed([sin for _, sin in turns])
        sizes = [part.shape[0] for part in hidden]
        fresh = (rotate(q, cos, sin), k, rotate(k, cos, sin), v)
        parts = list(zip(*(_split(x, sizes) for x in fresh), strict=True))
        decode_q = None
        if self.decode is not None:
            decode_q, _, decode_k, decode_v = parts.pop(0)
            self.decode.write(layer, decode_k, decode_v)
        for mover, (part_q, part_raw, part_k, part_v) in zip(movers, parts, strict=True):
            current = mover.slice
            current.q, current.fresh = part_q, (part_raw, part_k, part_v)
        return decode_q

    def _take_in(self, mover: _Mover, layer: int) -> None:
        """Compare the rows' new K and V with what is stored, then write them over it."""
        sequence, current = mover.sequence, mover.slice
        mover.layers_left -= 1
        if current.fresh is None:
            return  # projected by the pass before this one, and written
        (raw, k, v), current.fresh = current.fresh, None
        # not before: a projection alone takes a fraction of a layer, and speeds are told from these counts
        mover.row_layers += current.rows.shape[0]
        if sequence.capture is not None:
            sequence.capture.record(layer, current.rows, raw, v)
        self._observe(sequence, current, layer, raw, k, v)
        sequence.charges.cached_row_layers += current.cached_rows
        sequence.charges.question_row_layers += current.question_rows
        sequence.slab.write(layer, current.rows, current.rows_device, k, v)

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
            running.residual.correct(sequence.slab, layer, current.rows, raw, v, rope_of(self.model, sequence, layer))

    def _settle_projection(self, mover: _Mover, layer: int) -> bool:
        """End a pass that stops at the projection, if this is its layer. True when attention at `layer` is due."""
        sequence = mover.sequence
        assert sequence.current is not None  # a moving item has a pass
        if sequence.current.stop == "qkv" and layer == sequence.current.layers.stop - 1:
            self._end_slice(mover)
            following = sequence.slice
            return following is not None and following.layer == layer and following.q is not None
        return True

    def _attend(self, mover: _Mover, layer: int) -> torch.Tensor:
        sequence, current = mover.sequence, mover.slice
        assert sequence.current is not None  # a moving item has a pass
        assert current.q is not None  # projected, now or before its layer was loaded
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

    def _turn(self, mover: _Mover, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[rows, 1, dim]` of the slice's rows at one layer."""
        current, windowed = mover.slice, self.model.config.windowed(layer)
        if windowed not in current.turns:
            cos, sin = rope_of(self.model, mover.sequence, layer).gather(current.rows_device)
            current.turns[windowed] = cos[:, None], sin[:, None]
        return current.turns[windowed]

    def _end_slice_if_done(self, mover: _Mover) -> None:
        assert mover.sequence.current is not None  # a moving item has a pass
        if mover.slice.layer == mover.sequence.current.layers.stop:
            self._end_slice(mover)

    def _end_slice(self, mover: _Mover) -> None:
        """Store the slice's outputs; open the next slice of the pass, or the first one of the next pass."""
        sequence, current = mover.sequence, mover.slice
        sequence.partial.append(Frontier(current.layer, current.rows, current.hidden, current.q))
        sequence.slice = None
        assert sequence.current is not None  # a moving item has a pass
        if sequence.rows_started < sequence.current.rows.shape[0]:
            self.moving.remove(mover)
            return
        if sequence.current.shows_from is not None:
            show_rows(sequence, self.model)
        sequence.end_pass()
        if sequence.current is None:
            mover.hidden = sequence.last_hidden()
            sequence.frontier = None
            self.moving.remove(mover)
            return
        if sequence.current.layers.start == 0:
            self.moving.remove(mover)
            return
        open_slice(self.model, sequence, mover.item.rows_max)


def _packed(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(packed: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [packed] if len(sizes) == 1 else list(packed.split(sizes))
