from __future__ import annotations

import math

import pytest

from kvblend.engine.evaluation.methods import BASELINE, FULL, BadMethod, Run, plan_runs, split_methods
from kvblend.engine.recommended import recommended
from kvblend.engine.selectors.spec import SelectorSpec


def one(text: str, ratio: float = 0.1) -> Run:
    (run,) = plan_runs([text], [ratio])
    return run


def test_the_default_runs() -> None:
    found = [(run.method, run.ratio, run.recommended) for run in plan_runs()]
    assert found == [
        ("full", 1.0, False),
        ("reuse", 0.0, False),
        *(("divergence", ratio, False) for ratio in (0.05, 0.08, 0.15)),
        *(("recommended", ratio, True) for ratio in (0.0, 0.05, 0.08, 0.15)),
    ]


def test_a_recommended_run_has_the_recommended_setting() -> None:
    run = one("recommended")
    assert (run.conditioning, run.spec) == (recommended(0.1).conditioning, recommended(0.1).spec)


def test_chunks_are_computed_behind_the_system_prompt_unless_said() -> None:
    assert [one(f"{prefix}query").conditioning for prefix in ("", "bare:", "warm:")] == ["system", "bare", "warm"]


def test_fields_have_their_types() -> None:
    run = one("warm:query,residual=ridge,residual_fraction=0.7,sinks=4,score_layers=1+2")
    assert run == Run(
        "warm:query,residual=ridge,residual_fraction=0.7,sinks=4,score_layers=1+2",
        0.1,
        "warm",
        SelectorSpec(selector="query", residual="ridge", residual_fraction=0.7, sinks=4, score_layers=(1, 2)),
    )


def test_layers_may_be_named() -> None:
    assert one("query,score_layers=middle").spec == SelectorSpec(selector="query", score_layers="middle")


def test_full_and_reuse_run_once_whatever_the_ratios() -> None:
    assert plan_runs(["full", "reuse", "full"], [0.1, 0.2]) == [FULL, BASELINE]


def test_without_a_ratio_above_0_nothing_is_chosen() -> None:
    zero = one("divergence", 0.0)
    assert (zero.spec, zero.work) == (None, BASELINE.work)


def test_methods_that_say_how_many_take_no_ratio() -> None:
    narrowing = plan_runs(["divergence,check_layers=1+2,recompute_ratios=0.3+0.1"], [0.1, 0.2])
    assert [(run.ratio, run.plan_ratio) for run in narrowing] == [(0.3, 0.3)]
    thresholds = plan_runs(["divergence,thresholds=0.5"], [0.1, 0.2])
    assert [(run.ratio, run.plan_ratio) for run in thresholds] == [(None, 1.0)]


def test_different_ratios_are_different_work() -> None:
    assert one("query", 0.1).work != one("query", 0.2).work


def test_fields_stay_with_their_method_in_a_list() -> None:
    texts = ["full,reuse, warm:query,residual=ridge,sinks=2,random", "divergence"]
    assert split_methods(texts) == ["full", "reuse", "warm:query,residual=ridge,sinks=2", "random", "divergence"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best", "'best' is not known; choose full, reuse, recommended, divergence, query"),
        ("", "'' is not known"),
        ("cold:query", "conditioning is 'cold'; choose bare, system, warm"),
        ("warm:full", "full takes neither a conditioning nor fields"),
        ("reuse,sinks=2", "reuse takes a conditioning only"),
        ("query,colour=red", "'colour=red' is no field=value of a selection; fields: check_layers"),
        ("query,selector=random", "'selector=random' is no field=value"),
        ("query,sinks", "'sinks' is no field=value"),
        ("query,sinks=1,sinks=2", "sinks is given twice"),
        ("query,sinks=few", "sinks is 'few'; it must be a number"),
        ("query,sinks=-1", r"sinks is -1; it must be a whole number in 0\.\.4096"),
        ("query,score_layers=1-2", r"score_layers is '1-2'; it must be numbers joined by \+"),
        ("query,residual=best", "residual is 'best'; choose none, mean, distance, ridge, lowrank"),
    ],
)
def test_a_bad_method_is_named_with_what_is_possible(text: str, message: str) -> None:
    with pytest.raises(BadMethod, match=message):
        plan_runs([text])


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.nan, math.inf])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(BadMethod, match=rf"ratio is {ratio}; it must lie in 0\.\.1"):
        plan_runs([], [0.1, ratio])
