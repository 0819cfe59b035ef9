"""What selectors share: merging rows and taking the best of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.selectors.base import merge_rows, top_rows


@given(st.sets(st.integers(0, 200), max_size=30), st.integers(1, 4))
def test_merged_parts_are_all_rows_ascending(rows: set[int], parts: int) -> None:
    pieces = [torch.tensor(sorted(r for r in rows if r % parts == i), dtype=torch.int64) for i in range(parts)]
    assert merge_rows(*pieces).tolist() == sorted(rows)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 45))
def test_the_best_rows_by_definition(scores: list[int], count: int) -> None:
    rows = torch.arange(len(scores)) * 3 + 1
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    assert top_rows(rows, torch.tensor(scores).float(), count).tolist() == sorted(3 * i + 1 for i in best)


def test_ties_fall_to_the_earlier_position() -> None:
    assert top_rows(torch.tensor([4, 7, 9, 12]), torch.tensor([1.0, 2.0, 1.0, 1.0]), 3).tolist() == [4, 7, 9]


def test_a_count_beyond_the_rows_takes_all() -> None:
    assert top_rows(torch.tensor([4, 7]), torch.tensor([0.0, 1.0]), 9).tolist() == [4, 7]


def test_a_count_of_zero_takes_none() -> None:
    assert top_rows(torch.tensor([4, 7]), torch.tensor([0.0, 1.0]), 0).tolist() == []
