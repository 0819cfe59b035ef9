"""Choices that look at nothing: random rows from a seed, first tokens of every chunk."""

from __future__ import annotations

from typing import Any

import torch

from kvblend.engine.selectors.base import Pass, SelectionContext
from kvblend.engine.selectors.blind import BlindSelector
from kvblend.engine.selectors.spec import SelectorSpec


def only_pass(budget: int, **fields: Any) -> Pass:
    context = SelectionContext(
        num_layers=4,
        num_tokens=120,
        cached_rows=torch.arange(4, 116),
        fresh_rows=torch.arange(116, 120),
        question_rows=torch.arange(116, 120),
        budget=budget,
        cached_spans=((4, 60), (60, 116)),
    )
    (item,) = BlindSelector(SelectorSpec(**fields)).passes(context)
    return item


def chosen(budget: int, **fields: Any) -> list[int]:
    return [row for row in only_pass(budget, **fields).rows.tolist() if row < 116]


def test_one_pass_through_all_layers_that_observes_nothing() -> None:
    item = only_pass(5, selector="random")
    assert (item.layers, item.observe, item.stop, len(item.rows)) == (range(4), "nothing", "output", 9)


def test_random_rows_follow_the_seed() -> None:
    drawn = [chosen(20, selector="random", seed=seed) for seed in (0, 0, 1, (1 << 64) - 1)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] != drawn[3]


def test_random_rows_are_spread_over_all_positions() -> None:
    counts = torch.zeros(116)
    for seed in range(200):
        counts[chosen(56, selector="random", seed=seed)] += 1
    # every row is drawn with probability 1/2: 200 draws give 100, and 40 is six standard deviations off
    assert bool((counts[4:] > 60).all())
    assert bool((counts[4:] < 140).all())


def test_sinks_are_the_first_tokens_of_every_chunk() -> None:
    assert chosen(5, selector="sinks") == [4, 5, 6, 60, 61]


def test_a_residual_corrects_the_others() -> None:
    assert only_pass(5, selector="random", residual="mean").residual is not None


def test_without_a_budget_fresh_rows_alone_are_computed() -> None:
    assert chosen(0, selector="sinks") == []
