"""From results per question to one row per method and ratio, with intervals over questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from kvblend.engine.evaluation.bootstrap import Bootstrap
from kvblend.engine.evaluation.methods import BASELINE, FULL, Run
from kvblend.engine.evaluation.results import QuestionResult, RunResult


def summarise(results: Sequence[QuestionResult], runs: Sequence[Run], seed: int) -> list[dict[str, Any]]:
    """One row per run, in order. Means are over questions, `*_p99` over all positions of all questions.

    `kl_store_mean` is None where nothing was loaded that is stored narrower than computed. `kl_recovery` is 1 - mean
    KL / mean KL of plain reuse behind the system prompt on the same questions. `ci` holds paired bootstrap intervals of
    95 %; those of `f1_delta` are against the full prefill. At least one result.
    """
    bootstrap = Bootstrap(len(results), seed)
    baseline = _kl_means(_of(results, BASELINE))
    full = _of(results, FULL)
    return [_row(run, _of(results, run), baseline, full, bootstrap) for run in runs]


def _of(results: Sequence[QuestionResult], run: Run) -> list[RunResult]:
    return [result.find(run.method, run.ratio) for result in results]


def _kl_means(found: Sequence[RunResult]) -> list[float]:
    return [fmean(one.kl) for one in found]


def _row(
    run: Run, found: list[RunResult], baseline: list[float], full: list[RunResult], bootstrap: Bootstrap
) -> dict[str, Any]:
    def values(read: Callable[[RunResult], float]) -> list[float]:
        return [float(read(one)) for one in found]

    kl, kl_cont = _kl_means(found), [fmean(one.kl_cont) for one in found]
    nll_delta = values(lambda one: one.nll - one.nll_full)
    top1, f1 = values(lambda one: one.top1), values(lambda one: one.f1)
    f1_delta = [one - whole.f1 for one, whole in zip(f1, full, strict=True)]
    base = fmean(baseline)
    return {
        "method": run.method,
        "ratio": run.ratio,
        "recommended": run.recommended,
        "conditioning": run.conditioning,
        "charged_ratio": fmean(one.charged_ratio for one in found),
        "kl_mean": fmean(kl),
        "kl_p99": _p99([x for one in found for x in one.kl]),
        "kl_cont_mean": fmean(kl_cont),
        "kl_cont_p99": _p99([x for one in found for x in one.kl_cont]),
        "kl_store_mean": _store_mean(found),
        "kl_recovery": 1.0 - fmean(kl) / base if base > 0.0 else 0.0,
        "nll_delta": fmean(nll_delta),
        "top1": fmean(top1),
        "f1": fmean(f1),
        "f1_delta": fmean(f1_delta),
        "em": fmean(one.em for one in found),
        "rouge_l": fmean(one.rouge_l for one in found),
        "first_divergence": fmean(one.first_divergence for one in found),
        "ttft_ms_median": median(one.ttft_ms for one in found),
        "ci": {
            "kl_recovery": bootstrap.recovery(kl, baseline),
            "nll_delta": bootstrap.mean(nll_delta),
            "top1": bootstrap.mean(top1),
            "f1": bootstrap.mean(f1),
            "f1_delta": bootstrap.mean(f1_delta),
            "kl_mean": bootstrap.mean(kl),
            "kl_cont_mean": bootstrap.mean(kl_cont),
        },
    }


def _store_mean(found: Sequence[RunResult]) -> float | None:
    """Mean KL of stored precision; None where all is stored as computed, or nothing is loaded."""
    means = [fmean(one.kl_store) for one in found if one.kl_store]
    return fmean(means) if means else None


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99.0))
