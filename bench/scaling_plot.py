"""The curves of `bench/scaling.py` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

AXES = {"context": "tokens of the prompt", "chunks": "chunks", "ratio": "ratio", "requests at once": "requests at once"}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel per curve, one line per mode."""
    curves = list(dict.fromkeys(row["curve"] for row in rows))
    figure, grid = pyplot.subplots(1, len(curves), figsize=(4.6 * len(curves), 4), squeeze=False)
    for panel, curve in zip(grid[0], curves, strict=True):
        mine = [row for row in rows if row["curve"] == curve]
        for mode in dict.fromkeys(row["mode"] for row in mine):
            line = [row for row in mine if row["mode"] == mode]
            panel.plot([row["x"] for row in line], [row["ttft_ms_median"] for row in line], "o-", label=mode)
        panel.set_xlabel(AXES[curve])
        panel.grid(alpha=0.3)
        panel.legend()
        if curve == "context":
            panel.set_yscale("log")
        else:
            panel.set_ylim(bottom=0)
    grid[0][0].set_ylabel("time to first token, ms")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
