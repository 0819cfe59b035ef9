"""Slices of a pass: rows in position order, one at least, all at once where they belong together."""

from __future__ import annotations

import pytest
import torch
from blends import QUESTION, SYSTEM, A, B, prompt
from tiny_models import Bench, DictSource, tiny_model

from kvblend.engine.layout import Reuse
from kvblend.engine.selectors.base import Pass
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.sequence import Frontier, SequenceState
from kvblend.engine.slices import keep_shown, open_slice
from kvblend.engine.step import WorkItem

BENCH = Bench(tiny_model())
LAYOUT = prompt([A, B])


def fresh() -> SequenceState:
    return BENCH.start(LAYOUT, [Reuse.FRESH] * 4, 0.0, PlainSelector())


def test_slices_follow_one_another_in_position_order() -> None:
    sequence = fresh()
    taken = [open_slice(BENCH.model, sequence, 5).rows.tolist() for _ in range(2)]
    assert taken == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert sequence.rows_started == 10


@pytest.mark.parametrize("rows_max", [0, 1, -3])
def test_a_slice_has_one_row_at_least(rows_max: int) -> None:
    assert open_slice(BENCH.model, fresh(), rows_max).rows.tolist() == [0]


def test_the_last_slice_takes_what_is_left() -> None:
    sequence = fresh()
    sequence.rows_started = LAYOUT.num_tokens - 2
    assert open_slice(BENCH.model, sequence, 100).rows.tolist() == [LAYOUT.num_tokens - 2, LAYOUT.num_tokens - 1]


def test_a_pass_goes_on_from_the_rows_of_the_frontier() -> None:
    sequence = fresh()
    hidden, q = torch.randn(4, 48, dtype=torch.float64), torch.randn(4, 6, 8, dtype=torch.float64)
    sequence.frontier = Frontier(1, torch.tensor([2, 5, 7, 9]), hidden, q)
    sequence.current = Pass(range(1, 4), torch.tensor([5, 9]))
    opened = open_slice(BENCH.model, sequence, 100)
    assert opened.q is not None
    assert opened.layer == 1
    assert torch.equal(opened.hidden, hidden[[1, 3]])
    assert torch.equal(opened.q, q[[1, 3]])


def test_a_pass_with_a_residual_is_not_cut() -> None:
    payloads = {0: BENCH.payloads((), SYSTEM)}
    payloads |= {segment.start: BENCH.payloads(SYSTEM, segment.token_ids) for _, segment in LAYOUT.chunks()}
    marks = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH]
    selector = QuerySelector(SelectorSpec("query", residual="mean"))
    sequence = BENCH.start(LAYOUT, marks, 0.3, selector, DictSource(payloads))
    BENCH.step.run([WorkItem(sequence, 100)])
    assert sequence.current is not None
    assert torch.equal(open_slice(BENCH.model, sequence, 1).rows, sequence.current.rows)


def test_the_last_row_alone_goes_through_the_last_attention() -> None:
    sequence = fresh()
    opened = open_slice(BENCH.model, sequence, 6)
    keep_shown(sequence, opened)
    assert (opened.rows.tolist(), opened.hidden.shape[0], opened.rows_device.tolist()) == ([5], 1, [5])


def test_rows_that_are_shown_go_on_too() -> None:
    sequence = fresh()
    sequence.current = Pass(range(4), torch.arange(8), shows_from=5)
    opened = open_slice(BENCH.model, sequence, 8)
    keep_shown(sequence, opened)
    assert opened.rows.tolist() == [5, 6, 7]


def test_all_rows_go_on_where_attention_is_observed() -> None:
    sequence = fresh()
    sequence.current = Pass(range(4), torch.arange(8), observe="attention")
    opened = open_slice(BENCH.model, sequence, 8)
    keep_shown(sequence, opened)
    assert opened.rows.shape[0] == 8


def test_what_a_slice_is_charged_for_ends_with_the_prompt() -> None:
    sequence = fresh()
    sequence.rows_started = LAYOUT.num_tokens - len(QUESTION)
    assert open_slice(BENCH.model, sequence, 100).question_rows == len(QUESTION)
    run = BENCH.full(LAYOUT)
    run.sequence.append_token(1)
    assert open_slice(BENCH.model, run.sequence, 1).question_rows == 0
