"""What exact checks are made of: scattered rows, and a distance that no NaN slips through."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvblend.engine.evaluation.exactness import EveryNthRow, difference
from kvblend.engine.selectors.base import SelectionContext


def test_every_nth_cached_row_is_computed_beside_the_fresh_ones() -> None:
    context = SelectionContext(3, 12, torch.arange(2, 9), torch.tensor([9, 10, 11]), torch.tensor([10, 11]), budget=0)
    only = next(EveryNthRow(3).passes(context))
    assert only.rows.tolist() == [2, 5, 8, 9, 10, 11]
    assert only.layers == range(3)
    assert next(EveryNthRow(3).passes(replace(context, budget=7))).rows.tolist() == only.rows.tolist()


def test_difference_is_a_share_of_the_largest_number() -> None:
    assert difference(torch.tensor([4.0, 1.0]), torch.tensor([4.0, 2.0])) == pytest.approx(0.25)
    assert difference(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
