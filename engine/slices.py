"""Slices: as many rows of a pass as one tick takes, from where the pass starts."""

from __future__ import annotations

import torch

from kvblend.engine.model import Model
from kvblend.engine.sequence import SequenceState, Slice


def open_slice(model: Model, sequence: SequenceState, rows_max: int) -> Slice:
    """Begin the next slice of the sequence's pass, in position order: at most `rows_max` rows, one at least.

    A pass with a residual takes all its rows at once, because the residual is learnt from them together. A pass that
    does not start at layer 0 goes on from the frontier of the one before it.
    """
    running = sequence.current
    assert running is not None  # the scheduler plans unfinished sequences only
    count = max(1, rows_max) if running.residual is None else running.rows.shape[0]
    rows = running.rows[sequence.rows_started : sequence.rows_started + count]
    sequence.rows_started += rows.shape[0]
    start, q = running.layers.start, None
    if start == 0:
        hidden = model.embed(sequence.token_ids[rows].to(model.device))
    else:
        frontier = sequence.frontier
        assert frontier is not None  # SequenceState checked that passes follow one another
        where = torch.searchsorted(frontier.rows, rows).to(model.device)
        hidden = frontier.hidden.index_select(0, where)
        q = frontier.q.index_select(0, where) if frontier.q is not None else None
    opened = Slice(rows, rows.to(model.device), start, hidden, q)
    if sequence.num_computed_tokens < sequence.num_prompt_tokens:
        opened.cached_rows = int(torch.isin(rows, sequence.context.cached_rows).sum())
        opened.question_rows = int((rows >= sequence.context.question_rows[0]).sum())
    sequence.slice = opened
    return opened


def keep_shown(sequence: SequenceState, current: Slice) -> None:
    """Before the last layer's attention: only the rows that are shown, and the slice's last one, go on.

    The others have written their K and V, and nobody reads their output. Where attention is observed all rows count.
    """
    running = sequence.current
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
