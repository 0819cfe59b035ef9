"""Stored layers into a sequence's KV slots: keys rotated to their positions, values as they are."""

from __future__ import annotations

from kvblend.engine.decoding import rope_tables
from kvblend.engine.model import Model
from kvblend.engine.precision import Precision
from kvblend.engine.rope import RopeTable
from kvblend.engine.sequence import SequenceState


def rope_of(model: Model, sequence: SequenceState, layer: int) -> RopeTable:
    """The table that turns a sequence's keys and queries at one layer."""
    return rope_tables(model, sequence)[model.config.windowed(layer)]


def install_layer(model: Model, sequence: SequenceState, layer: int) -> bool:
    """Put a loaded layer's keys (rotated to their positions) and values into the sequence's slots, once.

    False where it is not loaded yet. Layers come in order.
    """
    if sequence.installed > layer:
        return True
    loaded = sequence.source.take(layer) if sequence.source is not None else None
    if loaded is None:
        return False
    stored = sequence.precision or Precision.of_model(model)
    parts = sorted((start, sequence.end_of(start), payload) for start, payload in loaded)
    echoes = []
    for start, end, payload in parts:
        sequence.note_sensitivity(start, stored.sensitivity(payload, end - start))
        if (echo := stored.echo(payload, end - start)) is not None:
            echoes.append((start, end, echo, sequence.repeats.of(start)))
    if parts:
        last = parts[-1][1]
        slots, turn = sequence.slab.view(layer, last), rope_of(model, sequence, layer).span(0, last)
        stored.decode_into(parts, slots, turn)
        if echoes:
            stored.decode_rows_into(echoes, slots, turn)
    sequence.installed = layer + 1
    return True
