"""Filling a budget by its definition: exact size, sinks, evenly spread probes, shares per chunk, blocks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.selectors.base import SelectionContext
from kvblend.engine.selectors.picking import Picker, Places, divide
from kvblend.engine.selectors.spec import SelectorSpec

SPANS = ((2, 8), (8, 18), (21, 25))
ROWS = [row for start, end in SPANS for row in range(start, end)]


def context(spans: tuple[tuple[int, int], ...] = SPANS) -> SelectionContext:
    end = spans[-1][1]
    return SelectionContext(
        num_layers=4,
        num_tokens=end + 2,
        cached_rows=torch.cat([torch.arange(*span) for span in spans]),
        fresh_rows=torch.tensor([end, end + 1]),
        question_rows=torch.tensor([end, end + 1]),
        budget=0,
        cached_spans=spans,
    )


def pick(count: int, planted: dict[int, float] | None = None, **fields: Any) -> list[int]:
    """Picked positions; scores are 0 but for the planted positions."""
    scores = torch.tensor([(planted or {}).get(row, 0.0) for row in ROWS])
    picked: list[int] = Picker(SelectorSpec(**fields)).pick(context(), torch.tensor(ROWS), scores, count).tolist()
    return picked


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)
specs = st.builds(
    SelectorSpec,
    sinks=st.integers(0, 4),
    span=st.integers(1, 5),
    probes=st.sampled_from([0.0, 0.3, 1.0]),
    chunk_budget=st.sampled_from(["free", "need", "equal"]),
)


@given(lengths, specs, st.integers(0, 40), st.integers(0, 1 << 16))
def test_exactly_the_count_is_picked_ascending(sizes: list[int], spec: SelectorSpec, count: int, seed: int) -> None:
    spans, start = [], 3
    for size in sizes:
        spans.append((start, start + size))
        start += size + seed % 3
    given = context(tuple(spans))
    generator = torch.Generator().manual_seed(seed)
    # a part of the rows may have been left out before
    rows = given.cached_rows[torch.rand(given.cached_rows.shape[0], generator=generator) < 0.8]
    scores = torch.rand(rows.shape[0], generator=generator)
    picked = Picker(spec).pick(given, rows, scores, count).tolist()
    assert len(picked) == min(count, len(rows))
    assert picked == sorted(set(picked) & set(rows.tolist()))


def test_without_options_the_best_rows_win_and_ties_fall_to_the_earlier() -> None:
    assert pick(3, {9: 1.0, 23: 2.0}) == [2, 9, 23]


def test_places_are_chunks_and_offsets() -> None:
    places = Places(context(), torch.tensor([2, 7, 8, 21, 24]))
    assert (places.chunk.tolist(), places.offset.tolist()) == ([0, 0, 1, 2, 2], [0, 5, 0, 0, 3])


def test_sinks_are_always_in_the_set() -> None:
    assert pick(8, {5: 9.0, 6: 8.0, 7: 7.0}, sinks=2) == [2, 3, 5, 6, 8, 9, 21, 22]


def test_too_many_sinks_give_every_chunk_its_first_tokens() -> None:
    assert pick(4, {5: 9.0}, sinks=2) == [2, 3, 8, 21]


def test_probes_lie_in_the_middle_of_equal_parts_in_proportion_to_the_chunks() -> None:
    assert pick(10, probes=1.0) == [3, 5, 7, 9, 11, 13, 15, 17, 22, 24]


def test_a_share_of_the_budget_is_spread_and_the_rest_is_the_best() -> None:
    assert pick(5, {7: 5.0, 23: 4.0, 15: 3.0}, probes=0.4) == [5, 7, 13, 15, 23]


def test_need_divides_the_budget_by_the_chunks_total_scores() -> None:
    scores = {2: 3.0, 3: 3.0, 8: 2.0, 9: 1.0, 21: 2.0, 22: 1.0}
    assert pick(4, scores, chunk_budget="need") == [2, 3, 8, 21]
    assert pick(4, scores) == [2, 3, 8, 21]
    assert pick(4, {2: 4.0, 3: 3.0, 8: 2.5, 9: 2.5, 21: 2.0}, chunk_budget="need") == [2, 3, 8, 21]
    assert pick(4, {2: 4.0, 3: 3.0, 8: 2.5, 9: 2.5, 21: 2.0}) == [2, 3, 8, 9]


def test_an_equal_budget_gives_every_chunk_the_same() -> None:
    assert pick(6, {8: 9.0, 9: 9.0, 10: 9.0, 11: 9.0, 7: 1.0, 24: 1.0}, chunk_budget="equal") == [2, 7, 8, 9, 21, 24]


def test_a_chunk_too_small_for_its_share_leaves_it_to_the_others() -> None:
    assert pick(17, chunk_budget="equal") == [*range(2, 8), *range(8, 15), *range(21, 25)]


def test_blocks_are_taken_whole_by_their_sum_and_the_last_one_in_part() -> None:
    # blocks of 4 from each chunk's start: 2-5, 6-7, 8-11, 12-15, 16-17, 21-24
    assert pick(4, {3: 5.0, 12: 3.0, 15: 3.0}, span=4) == [12, 13, 14, 15]
    assert pick(7, {3: 5.0, 12: 3.0, 15: 3.0}, span=4) == [2, 3, 4, 12, 13, 14, 15]


def test_blocks_do_not_cross_chunks() -> None:
    assert pick(2, {7: 1.0, 8: 1.0}, span=2) == [6, 7]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 30)), min_size=1, max_size=8), st.integers(0, 100))
def test_shares_sum_to_the_count_and_fit(pairs: list[tuple[float, int]], count: int) -> None:
    weights, room = [w for w, _ in pairs], [r for _, r in pairs]
    shares = divide(count, weights, room)
    assert sum(shares) == min(count, sum(room))
    assert all(0 <= share <= limit for share, limit in zip(shares, room, strict=True))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(0, 1000))
def test_shares_differ_from_the_proportion_by_less_than_one(weights: list[int], count: int) -> None:
    shares = divide(count, [float(w) for w in weights], [1000] * len(weights))
    exact = [Fraction(count * w, sum(weights)) for w in weights]
    assert all(abs(share - want) < 1 for share, want in zip(shares, exact, strict=True))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_without_a_sum_count_as_equal(weights: list[float]) -> None:
    assert divide(5, weights, [9, 9]) == [3, 2]


def test_the_largest_remainders_get_what_is_left() -> None:
    assert divide(9, [0.9, 0.05, 0.05], [9, 9, 9]) == [8, 1, 0]


def test_is_sink_marks_the_first_tokens_of_each_chunk() -> None:
    marks = Picker(SelectorSpec(sinks=2)).is_sink(context(), torch.tensor([2, 3, 4, 9, 10, 21]))
    assert marks.tolist() == [True, True, False, True, False, True]
