"""Unions and products of scores by their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvblend.engine.selectors.base import Observation, Pass, SelectionContext
from kvblend.engine.selectors.mixed import MixedSelector
from kvblend.engine.selectors.spec import SelectorSpec


def context(budget: int) -> SelectionContext:
    return SelectionContext(
        num_layers=4,
        num_tokens=20,
        cached_rows=torch.arange(4, 16),
        fresh_rows=torch.arange(16, 20),
        question_rows=torch.arange(16, 20),
        budget=budget,
        cached_spans=((4, 10), (10, 16)),
    )


def run(
    budget: int, attention: dict[int, float], change: dict[int, float], **fields: Any
) -> tuple[list[Pass], list[int]]:
    """All passes, and the cached rows of the last one, where every check layer shows the same change."""
    passes = MixedSelector(SelectorSpec(**fields)).passes(context(budget))
    items = [next(passes)]
    scores = torch.tensor([attention.get(row, 0.0) for row in range(20)])
    items.append(passes.send(Observation(items[0].rows, attention=scores)))
    while items[-1].observe == "divergence":
        shown = torch.tensor([change.get(row, 0.0) for row in items[-1].rows.tolist()])
        items.append(passes.send(Observation(items[-1].rows, shown, shown)))
    return items, [row for row in items[-1].rows.tolist() if row < 16]


@pytest.mark.parametrize("selector", ["union", "product"])
def test_the_question_looks_first_then_all_rows_are_compared(selector: str) -> None:
    items, _ = run(3, {}, {}, selector=selector, check_layers=(1, 2))
    assert [(item.layers, item.stop, item.observe, len(item.rows)) for item in items] == [
        (range(4), "output", "attention", 4),
        (range(2), "qkv", "divergence", 16),
        (range(1, 3), "qkv", "divergence", 16),
        (range(2, 4), "output", "nothing", 7),
    ]


def test_a_union_takes_half_by_attention_and_the_rest_by_change() -> None:
    attention, change = {4: 4.0, 5: 3.0, 6: 2.0}, {4: 9.0, 12: 8.0, 13: 7.0}
    assert run(4, attention, change, selector="union")[1] == [4, 5, 12, 13]
    assert run(3, attention, change, selector="union")[1] == [4, 5, 12]
    assert run(1, attention, change, selector="union")[1] == [4]


def test_a_product_wants_both() -> None:
    attention, change = {4: 9.0, 5: 3.0, 6: 2.0}, {5: 2.0, 6: 4.0, 12: 8.0}
    assert run(1, attention, change, selector="product")[1] == [6]
    assert run(2, attention, change, selector="product")[1] == [5, 6]


def test_a_product_of_tiny_scores_still_ranks() -> None:
    assert run(1, {5: 1e-30, 6: 2e-30}, {5: 1e-30, 6: 1e-30}, selector="product")[1] == [6]


@pytest.mark.parametrize("selector", ["union", "product"])
def test_without_a_budget_there_is_one_plain_pass(selector: Any) -> None:
    passes = list(MixedSelector(SelectorSpec(selector)).passes(context(0)))
    assert [(item.observe, item.rows.tolist()) for item in passes] == [("nothing", [16, 17, 18, 19])]
