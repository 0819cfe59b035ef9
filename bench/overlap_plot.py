"""The figures of `bench/overlap.py` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel per selector: measured, its bound, the sum of loading and computing."""
    selectors = list(dict.fromkeys(row["selector"] for row in rows))
    figure, grid = pyplot.subplots(1, len(selectors), figsize=(5.5 * len(selectors), 4.2), sharey=True, squeeze=False)
    panels = list(grid[0])
    for panel, selector in zip(panels, selectors, strict=True):
        mine = [row for row in rows if row["selector"] == selector]
        x = [row["tier_mb_s"] for row in mine]
        panel.plot(x, [row["in_memory_ms"] + row["load_only_ms"] for row in mine], "--", label="loading + computing")
        panel.plot(x, [row["bound_ms"] for row in mine], ":", label="bound")
        panel.plot(x, [row["ttft_ms"] for row in mine], "o-", label="measured")
        if "auto_ttft_ms" in mine[0]:
            panel.plot(x, [row["auto_ttft_ms"] for row in mine], "x-", label="measured, ratio auto")
        panel.set_title(selector)
        panel.set_xlabel("throughput of the tier, MB/s")
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time to first token, ms")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
