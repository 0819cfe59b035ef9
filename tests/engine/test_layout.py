"""Segments and plans: places, reuse marks, the exact prefix and the budget."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind

KIND = SegmentKind
E, C, F = Reuse.EXACT, Reuse.CACHED, Reuse.FRESH


def layout(*sizes: int) -> PromptLayout:
    """System, chunks and question of these sizes."""
    kinds = [KIND.SYSTEM, *[KIND.CHUNK] * (len(sizes) - 2), KIND.QUESTION]
    return PromptLayout.of(
        [(kind, range(100 * i, 100 * i + n)) for i, (kind, n) in enumerate(zip(kinds, sizes, strict=True))]
    )


def plan(*marks: Reuse, ratio: float = 0.15, size: int = 10) -> BlendPlan:
    return BlendPlan.of(layout(*[size] * len(marks)), marks, ratio)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_segments_follow_one_another_without_gaps(sizes: list[int]) -> None:
    placed = layout(*sizes)
    ends = [0, *(segment.end for segment in placed.segments)]
    assert [segment.start for segment in placed.segments] == ends[:-1]
    assert placed.num_tokens == len(placed.token_ids) == sum(sizes)


def test_token_ids_stand_in_prompt_order() -> None:
    assert layout(2, 3, 1).token_ids == (0, 1, 100, 101, 102, 200)


def test_an_empty_segment_is_refused_by_index() -> None:
    with pytest.raises(ValueError, match=r"segment 1 \(chunk\) has no tokens"):
        layout(2, 0, 1)


def test_an_empty_prompt_has_no_tokens() -> None:
    assert PromptLayout.of([]).num_tokens == 0


def test_chunks_keep_their_index_among_all_segments() -> None:
    assert [index for index, _ in layout(1, 1, 1, 1).chunks()] == [1, 2]


def test_an_exact_segment_behind_a_cached_one_is_cached() -> None:
    assert plan(E, C, E, F).reuse == (E, C, C, F)


def test_an_exact_segment_behind_a_fresh_one_stays_exact() -> None:
    assert plan(E, F, E, F).reuse == (E, F, E, F)


@pytest.mark.parametrize(
    ("marks", "exact_end"), [((E, E, C, F), 20), ((C, E, F), 0), ((E, F, E, C, F), 30), ((F, F), 20), ((E, C, F), 10)]
)
def test_the_exact_prefix_ends_at_the_first_cached_segment(marks: tuple[Reuse, ...], exact_end: int) -> None:
    assert plan(*marks).exact_end == exact_end


def test_neighbouring_spans_of_one_kind_are_merged() -> None:
    assert plan(E, C, C, F, C, F).spans(C) == [(10, 30), (40, 50)]


def test_spans_of_several_kinds_are_merged_together() -> None:
    assert plan(E, C, C, F).spans(E, C) == [(0, 30)]


@given(st.lists(st.sampled_from([E, C, F]), min_size=2, max_size=7))
def test_every_token_is_reused_in_exactly_one_way(marks: list[Reuse]) -> None:
    made = plan(*marks)
    assert sum(made.count(kind) for kind in Reuse) == made.layout.num_tokens


@given(st.integers(1, 2000), st.integers(0, 1000))
def test_the_budget_is_the_ratio_of_cached_rows_rounded_up(rows: int, thousandths: int) -> None:
    made = BlendPlan.of(layout(1, rows, 1), (E, C, F), thousandths / 1000)
    assert made.budget == math.ceil(Fraction(thousandths, 1000) * rows)


@pytest.mark.parametrize("ratio", [1e-6, 0.001, 0.01])
def test_a_tiny_ratio_still_buys_one_row(ratio: float) -> None:
    assert plan(E, C, F, ratio=ratio).budget == 1


def test_no_ratio_buys_a_row_that_is_not_cached() -> None:
    assert plan(E, E, F, ratio=1.0).budget == 0


def test_the_denominator_is_cached_rows_only() -> None:
    assert plan(E, C, F, F, ratio=0.5).budget == 5


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.nan, math.inf])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"recompute_ratio is .*; it must lie in 0\.\.1"):
        plan(E, C, F, ratio=ratio)


def test_a_mark_per_segment_is_wanted() -> None:
    with pytest.raises(ValueError, match="2 reuse marks for 3 segments"):
        BlendPlan.of(layout(1, 1, 1), (E, F), 0.0)
