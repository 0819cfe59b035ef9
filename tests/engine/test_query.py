"""Question-guided selection by its definition."""

from __future__ import annotations

import pytest
import torch

from kvblend.engine.residual import Residual
from kvblend.engine.selectors.base import Observation, SelectionContext
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.selectors.spec import NamedLayers, SelectorSpec


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
    passes = QuerySelector(SelectorSpec("query", residual="mean")).passes(context(budget))
    next(passes)
    second = passes.send(Observation(torch.arange(16, 20), attention=torch.rand(20)))
    assert isinstance(second.residual, Residual) == corrects


@pytest.mark.parametrize(
    ("layers", "scored", "end"), [("all", None, 4), ("middle", {1, 2, 3}, 4), ((0, 3), {0, 3}, 4), ((1,), {1}, 2)]
)
def test_which_layers_are_scored_is_set_and_the_pass_ends_behind_them(
    layers: tuple[int, ...] | NamedLayers, scored: set[int] | None, end: int
) -> None:
    first = next(QuerySelector(SelectorSpec("query", score_layers=layers)).passes(context(3)))
    assert (first.score_layers, first.layers) == (scored, range(end))


def test_a_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"score_layers is \(4,\); the model has layers 0\.\.3"):
        next(QuerySelector(SelectorSpec("query", score_layers=(4,))).passes(context(3)))


def test_a_share_of_the_budget_may_be_spread_evenly() -> None:
    passes = QuerySelector(SelectorSpec("query", probes=0.5)).passes(context(4))
    next(passes)
    scores = torch.zeros(20)
    scores[[14, 15]] = 1.0
    assert passes.send(Observation(torch.arange(16, 20), attention=scores)).rows.tolist()[:4] == [7, 13, 14, 15]


def test_a_step_that_observed_nothing_is_an_error() -> None:
    passes = QuerySelector().passes(context(3))
    first = next(passes)
    with pytest.raises(RuntimeError, match="did not observe attention"):
        passes.send(Observation(first.rows))


def weighed(sensitivity: torch.Tensor | None, scores: list[float], budget: int = 2) -> list[int]:
    """Rows that "sensitive" chooses of 4..15, given their attention."""
    passes = QuerySelector(SelectorSpec("sensitive")).passes(context(budget))
    next(passes)
    attention = torch.cat((torch.zeros(4), torch.tensor(scores), torch.zeros(4)))
    second = passes.send(Observation(torch.arange(16, 20), attention=attention, sensitivity=sensitivity))
    return second.rows[:-4].tolist()


def test_sensitive_weights_attention_with_what_depends_on_the_context() -> None:
    weights = torch.full((20,), 0.1)
    weights[[6, 9]] = torch.tensor([5.0, 7.0])
    assert weighed(weights, [4.0, 3.0, *[1.0] * 10]) == [6, 9]


def test_a_row_stored_without_sensitivity_counts_as_an_average_row() -> None:
    weights = torch.full((20,), torch.nan)
    weights[4:10] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 7.0])
    # the mean of those that are known is 2
    assert weighed(weights, [0.0, 3.0, 0.0, 0.0, 0.0, 0.5, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]) == [9, 10]


def test_without_any_sensitivity_attention_decides_alone() -> None:
    scores = [4.0, 3.0, *[1.0] * 10]
    assert weighed(None, scores) == weighed(torch.full((20,), torch.nan), scores) == [4, 5]
