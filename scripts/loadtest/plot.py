"""First-token time against rate, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from loadtest.figures import REUSES


def plot(results: Sequence[Mapping[str, Any]], percentile: str, path: Path) -> None:
    """Draw median and `percentile` (such as p99) over all requests, and the median of each kind of reuse.

    A rate without a limit stands where the requests came through.
    """
    ordered = sorted(results, key=place)
    figure = Figure(figsize=(7.0, 4.5))
    axes = figure.subplots()
    lines = [("all, median", "o-", [result.get("median_ttft_ms") for result in ordered])]
    lines.append((f"all, {percentile}", "o:", [result.get(f"{percentile}_ttft_ms") for result in ordered]))
    for kind in REUSES[:3]:
        medians = [result["reuse"][kind]["median_ttft_ms"] for result in ordered]
        lines.append((f"{kind.replace('_', ' ')}, median", "x--", medians))
    for label, style, values in lines:
        if any(value is not None for value in values):
            heights = [math.nan if value is None else value for value in values]
            axes.plot([place(result) for result in ordered], heights, style, label=label)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("time to first token, ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def place(result: Mapping[str, Any]) -> float:
    """Where a result stands on the axis of rates."""
    rate = result["request_rate"]
    return float(result["request_throughput"] if rate == "inf" else rate)
