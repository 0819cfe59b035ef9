"""Question-guided selection by its definition."""

from __future__ import annotations

import pytest
import torch

from kvblend.engine.residual import Residual
from kvblend.engine.selectors.base import Observation, SelectionContext
from kvblend.engine.selectors.query import QuerySelector


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


def test_the_first_pass_runs_the_fresh_rows_alone_through_all_layers() -> None:
    first = next(QuerySelector().passes(context(3)))
    assert (first.layers, first.observe) == (range(4), "attention")
    assert first.rows.tolist() == [16, 17, 18, 19]


def test_the_second_pass_computes_the_rows_with_most_attention() -> None:
    passes = QuerySelector().passes(context(3))
    next(passes)
    scores = torch.zeros(20)
    scores[[5, 11, 14]] = torch.tensor([1.0, 3.0, 2.0])
    scores[[0, 17]] = 9.0
    second = passes.send(Observation(torch.arange(16, 20), attention=scores))
    assert second.rows.tolist() == [5, 11, 14, 16, 17, 18, 19]
    assert second.layers == range(4)
    assert second.residual is None


def test_without_a_budget_there_is_one_plain_pass() -> None:
    passes = list(QuerySelector().passes(context(0)))
    assert [(p.observe, p.rows.tolist()) for p in passes] == [("nothing", [16, 17, 18, 19])]


@pytest.mark.parametrize(("budget", "corrects"), [(3, True), (12, False)])
def test_a_residual_is_used_where_rows_are_left(budget: int, corrects: bool) -> None:
    passes = QuerySelector(residual="mean").passes(context(budget))
    next(passes)
    second = passes.send(Observation(torch.arange(16, 20), attention=torch.rand(20)))
    assert isinstance(second.residual, Residual) == corrects
