"""A run's figures, under the keys that `vllm bench serve` saves them with."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.options import Options
from loadtest.outcome import Outcome, Reuse

REUSES: tuple[Reuse, ...] = ("full_hit", "partial_hit", "cold", "unknown")


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles in ms; None where there is no value."""
    keys = [*(f"{kind}_{name}_ms" for kind in ("mean", "median", "std"))]
    keys += [f"{percentile_name(p)}_{name}_ms" for p in percentiles]
    if not seconds:
        return dict.fromkeys(keys)
    values = np.asarray(seconds) * 1000
    figures = [values.mean(), np.median(values), values.std(), *np.percentile(values, list(percentiles))]
    return {key: float(value) for key, value in zip(keys, figures, strict=True)}


def ttft(outcome: Outcome) -> float | None:
    """Seconds from when the request was due to its first text; None without text."""
    return None if outcome.first_s is None else outcome.first_s - outcome.due_s


def e2el(outcome: Outcome) -> float:
    """Seconds from when the request was due to its end."""
    return outcome.end_s - outcome.due_s


def tpot(outcome: Outcome) -> float | None:
    """Seconds per token after the first; None for a single token."""
    if outcome.first_s is None or outcome.output_tokens < 2:
        return None
    return (outcome.end_s - outcome.first_s) / (outcome.output_tokens - 1)


def is_good(outcome: Outcome, goals: Sequence[tuple[str, float]]) -> bool:
    """Whether every goal (ms) is kept; a time that there is none of is kept."""
    times = {"ttft": ttft(outcome), "tpot": tpot(outcome), "e2el": e2el(outcome)}
    return all((value := times[name]) is None or value * 1000 <= limit for name, limit in goals)


def timings(outcomes: Sequence[Outcome], options: Options) -> dict[str, float | None]:
    """The times of all metrics; of requests read as fast as they came."""
    given: dict[str, list[float]] = {
        "ttft": [value for outcome in outcomes if (value := ttft(outcome)) is not None],
        "tpot": [value for outcome in outcomes if (value := tpot(outcome)) is not None],
        "itl": [gap for outcome in outcomes for gap in outcome.gaps_s],
        "e2el": [e2el(outcome) for outcome in outcomes],
    }
    found: dict[str, float | None] = {}
    for name in options.percentile_metrics:
        found |= spread(name, given[name], options.metric_percentiles)
    return found


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were open at once."""
    # at the same time an end counts before a beginning
    changes = sorted([(o.sent_s, 1) for o in outcomes] + [(o.end_s, -1) for o in outcomes])
    return max(np.cumsum([change for _, change in changes]), default=0) if changes else 0


def peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """The most pieces of text that came within one second of the run."""
    seconds: collections.Counter[int] = collections.Counter()
    for outcome in outcomes:
        if outcome.first_s is not None:
            seconds.update(np.floor(outcome.first_s + np.cumsum([0.0, *outcome.gaps_s])).astype(int).tolist())
    return float(max(seconds.values(), default=0))


def compute(outcomes: Sequence[Outcome], options: Options, rate: float) -> dict[str, Any]:
    """Everything about one rate. Times are of completed requests, those of slow readers left out."""
    done = [outcome for outcome in outcomes if outcome.status == "ok"]
    timed = [outcome for outcome in done if outcome.behaviour != "slow"]
    duration = max((outcome.end_s for outcome in outcomes), default=0.0)
    per_second = 1 / duration if duration > 0 else math.nan
    read, written = sum(o.input_tokens for o in done), sum(o.output_tokens for o in done)
    good = sum(is_good(outcome, options.goodput) for outcome in timed)
    statuses = collections.Counter(outcome.status for outcome in outcomes)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": statuses["failed"],
        "cancelled": statuses["cancelled"],
        "disconnected": statuses["disconnected"],
        "slow_readers": len(done) - len(timed),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "total_cached_tokens": sum(o.cached_tokens for o in done),
        "estimated_token_counts": sum(o.estimated for o in done),
        "request_throughput": len(done) * per_second,
        "request_goodput": good * per_second if options.goodput else None,
        "output_throughput": written * per_second,
        "total_token_throughput": (read + written) * per_second,
        "max_output_tokens_per_s": peak_tokens(outcomes),
        "max_concurrent_requests": int(peak_concurrency(outcomes)),
    }
    figures |= timings(timed, options)
    waits = [max(0.0, outcome.sent_s - outcome.due_s) for outcome in timed]
    figures |= spread("client_queue_time", waits, options.metric_percentiles)
    if not math.isinf(rate):
        figures |= spread("client_lag", [outcome.lag_s for outcome in outcomes], options.metric_percentiles)
    figures["reuse"] = {kind: _of_kind(kind, timed, options) for kind in REUSES}
    return figures


def _of_kind(kind: Reuse, timed: Sequence[Outcome], options: Options) -> dict[str, Any]:
    chosen = [outcome for outcome in timed if outcome.reuse == kind]
    firsts = [value for outcome in chosen if (value := ttft(outcome)) is not None]
    ends = [e2el(outcome) for outcome in chosen]
    percentiles = options.metric_percentiles
    return {"completed": len(chosen), **spread("ttft", firsts, percentiles), **spread("e2el", ends, percentiles)}


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """The figures of each request, in the order of the requests; times in seconds."""
    return {
        "input_lens": [o.input_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [ttft(o) for o in outcomes],
        "itls": [o.gaps_s for o in outcomes],
        "latencies": [e2el(o) for o in outcomes],
        "start_times": [o.sent_s for o in outcomes],
        "due_times": [o.due_s for o in outcomes],
        "queue_times": [max(0.0, o.sent_s - o.due_s) for o in outcomes],
        "statuses": [o.status for o in outcomes],
        "behaviours": [o.behaviour for o in outcomes],
        "reuses": [o.reuse for o in outcomes],
        "cached_tokens": [o.cached_tokens for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }
