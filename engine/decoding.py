"""Rows of sequences behind their prompts: one new row of each, through all layers side by side in one tick."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvblend.engine.attention.base import first_key
from kvblend.engine.attention.single import attend_single
from kvblend.engine.model import Model
from kvblend.engine.rope import RopeTable
from kvblend.engine.sequence import Frontier, SequenceState

# of every layer a view per sequence: made in one go, because a slice per layer and sequence costs more than its row
_Views = list[list[torch.Tensor]]


def is_decode_row(sequence: SequenceState, layers_max: int | None) -> bool:
    """Whether what is due of `sequence` is one row behind its prompt that may go through all layers at once."""
    due = sequence.current
    if due is None or sequence.slice is not None or due.rows.shape[0] != 1:
        return False
    whole = layers_max is None or layers_max >= sequence.num_layers
    return whole and sequence.num_computed_tokens >= sequence.num_prompt_tokens


class DecodeRows:
    """The packed rows: `hidden [sequences, hidden_size]` is the input of the layer that comes next.

    A row has no mask: it sees its sequence's slots up to its own, or its window of them, so all that differs between
    layers are views of the slots.
    """

    def __init__(self, model: Model, sequences: Sequence[SequenceState]) -> None:
        self.sequences = sequences
        self._model = model
        self._positions = [_position(sequence) for sequence in sequences]
        ids = [int(sequence.token_ids[at]) for sequence, at in zip(sequences, self._positions, strict=True)]
        self.hidden = model.embed(torch.tensor(ids, device=model.device))
        self._slots_k = self._slots([sequence.slab.k for sequence in sequences])
        self._slots_v = self._slots([sequence.slab.v for sequence in sequences])
        self._seen: dict[int | None, tuple[_Views, _Views]] = {}
        self._turns: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def rows(self) -> int:
        """How many rows there are: one of each sequence."""
        return len(self.sequences)

    def turns(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[rows, 1, rotary_dim]` of the rows at `layer`."""
        windowed = self._model.config.windowed(layer)
        if windowed not in self._turns:
            cos, sin = self._gather([rope_tables(self._model, sequence)[windowed] for sequence in self.sequences])
            self._turns[windowed] = cos[:, None], sin[:, None]
        return self._turns[windowed]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the rows' K (rotated) and V `[rows, kv_heads, head_dim]` into their sequences' slots."""
        for slots, fresh in ((self._slots_k[layer], k), (self._slots_v[layer], v)):
            for slot, row in zip(slots, fresh.unbind(0), strict=True):
                slot.copy_(row)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention `[rows, heads * head_dim]` of q `[rows, heads, head_dim]`, each over its own sequence's slots."""
        config, scale = self._model.config, self._model.scale
        keys, values = self._keys(config.sliding_window if config.windowed(layer) else None)
        shape = (self.rows, 1, config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        parts = zip(q.reshape(shape).unbind(0), keys[layer], values[layer], strict=True)
        out = [attend_single(row, k, v, scale) for row, k, v in parts]
        return (out[0] if len(out) == 1 else torch.cat(out)).reshape(self.rows, -1)

    def end(self) -> list[torch.Tensor]:
        """The rows have left the last layer: every sequence's pass ends. Returns its `hidden [hidden_size]`."""
        for sequence, hidden in zip(self.sequences, self.hidden.split(1), strict=True):
            assert sequence.current is not None  # its row has just been computed
            sequence.partial = [Frontier(sequence.num_layers, sequence.current.rows, hidden, None)]
            sequence.end_pass()
            sequence.frontier = None
        return list(self.hidden.unbind(0))

    def _slots(self, slabs: list[torch.Tensor]) -> _Views:
        """Per layer the sequences' slots `[kv_heads, head_dim]` at their rows' positions."""
        views = [slab[:, :, at].unbind(0) for slab, at in zip(slabs, self._positions, strict=True)]
        return [list(layer) for layer in zip(*views, strict=True)]

    def _keys(self, window: int | None) -> tuple[_Views, _Views]:
        """K and V `[1, kv_heads, keys, head_dim]` that the rows see with `window`, per layer and sequence."""
        if window not in self._seen:
            spans = [slice(first_key(at, window), at + 1) for at in self._positions]
            pairs = list(zip(self.sequences, spans, strict=True))
            views = [[s.slab.k[:, None, :, span].unbind(0) for s, span in pairs],
                     [s.slab.v[:, None, :, span].unbind(0) for s, span in pairs]]  # fmt: skip
            keys, values = ([list(layer) for layer in zip(*of, strict=True)] for of in views)
            self._seen[window] = keys, values
        return self._seen[window]

    def _gather(self, tables: list[RopeTable]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[rows, rotary_dim]`; as a rule all sequences turn by one table."""
        at = torch.tensor(self._positions, device=self._model.device)
        if all(table is tables[0] for table in tables):
            return tables[0].gather(at)
        turns = [table.gather(where) for table, where in zip(tables, at.split(1), strict=True)]
        return torch.cat([cos for cos, _ in turns]), torch.cat([sin for _, sin in turns])


def rope_tables(model: Model, sequence: SequenceState) -> tuple[RopeTable, RopeTable]:
    """The rotations of a sequence, of plain and of windowed layers: those of its prompt's length, looked up once."""
    if sequence.ropes is None:
        sequence.ropes = model.ropes.tables(sequence.num_prompt_tokens, sequence.slab.capacity)
    return sequence.ropes


def _position(sequence: SequenceState) -> int:
    assert sequence.current is not None  # only rows that are due are packed
    return int(sequence.current.rows[0])
