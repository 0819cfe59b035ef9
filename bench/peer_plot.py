"""The figures of `bench/peers.py` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars: time to first token of every engine and mode, and requests per second where they were measured."""
    rated = [row for row in rows if row["requests_per_s"] is not None]
    panels = [("time to first token, ms", "ttft_ms_median", rows), ("requests per second", "requests_per_s", rated)]
    panels = [panel for panel in panels if panel[2]]
    figure, grid = pyplot.subplots(1, len(panels), figsize=(6.5 * len(panels), 3.8), squeeze=False)
    for panel, (title, field, shown) in zip(grid[0], panels, strict=True):
        names = [f"{row['engine']} {row['mode']}" for row in shown]
        colours = ["tab:orange" if row["engine"] == "kvblend" else "tab:gray" for row in shown]
        bars = panel.barh(names, [row[field] for row in shown], color=colours)
        panel.bar_label(bars, fmt="%.3g", padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_xlabel(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
