"""The result block, the table over several rates, and the JSON files."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.figures import REUSES, details, percentile_name
from loadtest.options import Options
from loadtest.outcome import Outcome

WIDTH = 50
LAG_MS_MAX = 10.0
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}


def line(label: str, value: float | str | None) -> str:
    """A label and its value: a count as it is, a measure with two places, n/a for none."""
    shown = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {shown}"


def rate_value(rate: float) -> float | str:
    """A rate as JSON has it."""
    return "inf" if math.isinf(rate) else rate


def block(result: Mapping[str, Any], options: Options) -> Iterator[str]:
    """The lines of one rate's result."""
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield line("Successful requests", result["completed"])
    yield line("Failed requests", result["failed"])
    for kind in ("cancelled", "disconnected", "slow_readers"):
        if result[kind]:
            yield line(f"{kind.replace('_', ' ').capitalize()}", result[kind])
    if options.max_concurrency is not None:
        yield line("Maximum request concurrency", options.max_concurrency)
    if result["request_rate"] != "inf":
        yield line("Request rate configured (RPS)", float(result["request_rate"]))
    yield line("Benchmark duration (s)", result["duration"])
    yield line("Total input tokens", result["total_input_tokens"])
    yield line("Total generated tokens", result["total_output_tokens"])
    yield line("Total cached tokens", result["total_cached_tokens"])
    yield line("Request throughput (req/s)", result["request_throughput"])
    if options.goodput:
        yield line("Request goodput (req/s)", result["request_goodput"])
    yield line("Output token throughput (tok/s)", result["output_throughput"])
    yield line("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    yield line("Peak concurrent requests", result["max_concurrent_requests"])
    yield line("Total token throughput (tok/s)", result["total_token_throughput"])
    waits = ["client_queue_time"] if options.max_concurrency is not None else []
    for name in (*options.percentile_metrics, *waits):
        short, title = TITLES[name]
        yield f"{title:-^{WIDTH}}"
        yield from _times(name, short, result, options)
    for kind in REUSES:
        part = result["reuse"][kind]
        if part["completed"]:
            yield f"{kind.replace('_', ' ').capitalize() + ': Time to First Token':-^{WIDTH}}"
            yield line("Requests", part["completed"])
            yield from _times("ttft", "TTFT", part, options)
    yield "=" * WIDTH


def _times(name: str, short: str, result: Mapping[str, Any], options: Options) -> Iterator[str]:
    yield line(f"Mean {short} (ms)", result[f"mean_{name}_ms"])
    yield line(f"Median {short} (ms)", result[f"median_{name}_ms"])
    for percentile in options.metric_percentiles:
        word = percentile_name(percentile)
        yield line(f"{word.upper()} {short} (ms)", result[f"{word}_{name}_ms"])


def warnings(outcomes: Sequence[Outcome], result: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of the figures should know: errors by how often they came, a late client, counted tokens."""
    errors = collections.Counter(outcome.error for outcome in outcomes if outcome.error)
    for error, times in errors.most_common(5):
        yield f"failed {times} times: {error}"
    lag = max((outcome.lag_s for outcome in outcomes), default=0.0) * 1000
    if lag > LAG_MS_MAX:
        yield f"the client itself was up to {lag:.0f} ms late, which is in the times; more --processes may help"
    if counted := result["estimated_token_counts"]:
        yield f"{counted} answers came without usage: their tokens are counted as words and pieces"


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each rate."""
    yield f"{'rate':>8} {'req/s':>8} {'median TTFT ms':>15} {'full hit':>10} {'partial':>10} {'cold':>10} {'failed':>7}"
    for result in results:
        reuse = result["reuse"]
        cells = [reuse[kind]["median_ttft_ms"] for kind in REUSES[:3]]
        median = result.get("median_ttft_ms")
        shown = ["-" if value is None else f"{value:.1f}" for value in (median, *cells)]
        yield (
            f"{result['request_rate']:>8} {result['request_throughput']:>8.2f} {shown[0]:>15} {shown[1]:>10} "
            f"{shown[2]:>10} {shown[3]:>10} {result['failed']:>7}"
        )


def describe(options: Options, model: str, rate: float, now: datetime) -> dict[str, Any]:
    """What was run, as the result files begin."""
    return {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "transport": options.transport,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": options.num_prompts,
        **dict(options.metadata),
        "request_rate": rate_value(rate),
        "burstiness": rate_value(options.burstiness),
        "max_concurrency": options.max_concurrency,
    }


def result_path(options: Options, model: str, rate: float, now: datetime) -> Path:
    """Where a rate's result goes; with several rates a given name gets the rate before its ending."""
    if options.result_filename is None:
        limit = f"-concurrency{options.max_concurrency}" if options.max_concurrency is not None else ""
        base = model.rsplit("/", 1)[-1]
        name = f"{options.label or options.backend}-{rate:g}qps{limit}-{base}-{now.strftime('%Y%m%d-%H%M%S')}.json"
        return options.result_dir / name.replace("/", "-")
    given = Path(options.result_filename)
    name = f"{given.stem}-{rate:g}qps{given.suffix}" if len(options.request_rate) > 1 else given.name
    return options.result_dir / name


def save(path: Path, result: Mapping[str, Any], outcomes: Sequence[Outcome], *, detailed: bool) -> None:
    """Write the result, with the figures of each request if `detailed`."""
    content = {**result, **(details(outcomes) if detailed else {})}
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
