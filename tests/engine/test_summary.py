from __future__ import annotations

from typing import Any

import pytest

from kvblend.engine.evaluation.methods import BASELINE, FULL, Run
from kvblend.engine.evaluation.results import QuestionResult, RunResult
from kvblend.engine.evaluation.summary import summarise
from kvblend.engine.selectors.spec import SelectorSpec

QUERY = Run("query", 0.1, "warm", SelectorSpec(selector="query"), recommended=True)
PROMISED = {
    "method", "ratio", "recommended", "charged_ratio", "kl_mean", "kl_p99", "kl_cont_mean", "kl_recovery", "nll_delta",
    "top1", "f1", "ttft_ms_median", "ci",
}  # fmt: skip


def run_result(run: Run, **changes: Any) -> RunResult:
    values: dict[str, Any] = {
        "method": run.method, "ratio": run.ratio, "kl": (0.0,), "kl_cont": (0.0,), "nll": 1.0, "nll_full": 1.0,
        "top1": 1.0, "f1": 0.5, "em": 0.0, "rouge_l": 0.5, "answer": "", "first_divergence": 3, "ttft_ms": 10.0,
        "charged_ratio": 0.0, "estimates": {},
    }  # fmt: skip
    return RunResult(**{**values, **changes})


def results() -> list[QuestionResult]:
    return [
        QuestionResult(
            index,
            (
                run_result(FULL, charged_ratio=1.0),
                run_result(BASELINE, kl=baseline),
                run_result(
                    QUERY, kl=kl, kl_cont=(0.1, 0.3), nll=nll, top1=0.5, f1=0.25, ttft_ms=ms, charged_ratio=charged
                ),
            ),
        )
        for index, (baseline, kl, nll, ms, charged) in enumerate(
            [((0.4, 0.6), (0.1, 0.3), 1.5, 7.0, 0.1), ((1.0,), (0.1,), 1.1, 9.0, 0.2), ((3.0,), (0.0,), 0.7, 20.0, 0.3)]
        )
    ]


def row(run: Run) -> dict[str, Any]:
    return summarise(results(), [run], 0)[0]


def test_rows_have_the_promised_keys() -> None:
    assert row(QUERY).keys() >= PROMISED
    assert row(QUERY)["ci"].keys() >= {"kl_recovery", "nll_delta", "top1", "f1", "kl_mean"}


def test_figures_are_those_computed_by_hand() -> None:
    found = row(QUERY)
    assert (found["method"], found["ratio"], found["recommended"]) == ("query", 0.1, True)
    wanted = {
        "kl_mean": (0.2 + 0.1 + 0.0) / 3,
        "kl_recovery": 1 - 0.3 / (0.5 + 1.0 + 3.0),
        "kl_cont_mean": 0.2,
        "nll_delta": 0.1,
        "ttft_ms_median": 9.0,
        "charged_ratio": 0.2,
        "f1_delta": -0.25,
        "top1": 0.5,
        "first_divergence": 3.0,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_the_kl_of_stored_precision_is_a_mean_of_questions_where_anything_was_rounded() -> None:
    assert row(QUERY)["kl_store_mean"] is None
    rounded = [
        QuestionResult(i, (run_result(FULL), run_result(BASELINE), run_result(QUERY, kl_store=kl)))
        for i, kl in enumerate([(0.1, 0.3), (0.4,)])
    ]
    assert summarise(rounded, [QUERY], 0)[0]["kl_store_mean"] == pytest.approx(0.3)


def test_the_99th_percentile_is_over_positions() -> None:
    # positions 0, .1, .1, .3: 97 hundredths of the way from the third to the last
    assert row(QUERY)["kl_p99"] == pytest.approx(0.1 + 0.97 * 0.2)


def test_full_prefill_recovers_everything_and_plain_reuse_nothing() -> None:
    assert (row(FULL)["kl_mean"], row(FULL)["kl_recovery"]) == (0.0, 1.0)
    assert row(BASELINE)["kl_recovery"] == 0.0
    assert row(BASELINE)["ci"]["kl_recovery"] == (0.0, 0.0)


def test_intervals_hold_the_figure() -> None:
    found = row(QUERY)
    for name, (low, high) in found["ci"].items():
        assert low <= found[name] <= high, name


def test_rows_stand_in_the_order_of_the_runs() -> None:
    assert [r["method"] for r in summarise(results(), [QUERY, FULL], 0)] == ["query", "full"]


def test_a_baseline_without_divergence_recovers_nothing() -> None:
    same = [QuestionResult(0, (run_result(FULL), run_result(BASELINE), run_result(QUERY)))]
    assert summarise(same, [QUERY], 0)[0]["kl_recovery"] == 0.0
