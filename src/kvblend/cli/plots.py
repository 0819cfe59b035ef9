"""A picture of an evaluation: KL recovery against what was recomputed, and against the time to the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

Rows = Sequence[Mapping[str, Any]]
_MARKERS = "osD^vPX*<>"


def draw_quality(rows: Rows, path: Path, title: str) -> None:
    """Write two panels to `path`, a line per method with its 95 % intervals. The file's ending chooses the format."""
    figure = Figure(figsize=(13.0, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    # full prefill has charged 1, far from all else: it stands in the right panel only
    for number, (name, points) in enumerate(group_rows(rows).items()):
        if name != "full":
            _draw(left, name, points, "charged_ratio", number)
        _draw(right, name, points, "ttft_ms_median", number)
    for axes in (left, right):
        axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.3, which="both")
    left.set_xlabel("charged ratio: share of the reused rows' work that was done again")
    left.set_ylabel("KL recovery (0: plain reuse, 1: full prefill)")
    right.set_xlabel("median time to first token, ms")
    right.set_xscale("log")
    for formatted in (right.xaxis.set_major_formatter, right.xaxis.set_minor_formatter):
        formatted(LogFormatter(minor_thresholds=(2.0, 0.6)))
    right.legend(fontsize="small", loc="best")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def group_rows(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by method, each ordered by charged ratio."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row["method"]), []).append(row)
    return {name: sorted(group, key=lambda row: float(row["charged_ratio"])) for name, group in groups.items()}


def _draw(axes: Axes, name: str, rows: Rows, x_name: str, number: int) -> None:
    middle = [float(row["kl_recovery"]) for row in rows]
    # a percentile interval need not hold the mean itself
    lows = [max(0.0, y - float(row["ci"]["kl_recovery"][0])) for y, row in zip(middle, rows, strict=True)]
    highs = [max(0.0, float(row["ci"]["kl_recovery"][1]) - y) for y, row in zip(middle, rows, strict=True)]
    axes.errorbar(
        [float(row[x_name]) for row in rows],
        middle,
        yerr=(lows, highs),
        marker=_MARKERS[number % len(_MARKERS)],
        color=f"C{number % 10}",
        capsize=3,
        linewidth=1.2,
        label=name,
    )
