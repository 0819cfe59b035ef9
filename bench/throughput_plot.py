"""The figures of `bench/throughput.py` as a picture: first token against the rate of arrivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One line per mode through its open loops, from its unloaded request on; a mark where it is saturated."""
    figure = Figure(figsize=(7.0, 4.5))
    axes = figure.subplots()
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in rows) if any(_is_open(row, mode) for row in rows)]
    for number, mode in enumerate(modes):
        colour, mine = f"C{number}", sorted((r for r in rows if _is_open(r, mode)), key=lambda r: float(r["rate"]))
        alone = [row for row in rows if row["mode"] == mode and row["clients"] == 1]
        rates = [0.0 for _ in alone] + [row["rate"] for row in mine]
        for name, style in (("ttft_p50_ms", "o-"), ("ttft_p99_ms", "x:")):
            heights = [row[name] / 1e3 for row in [*alone, *mine]]
            axes.plot(rates, heights, style, color=colour, label=f"{mode}, {name[5:8]}")
        for row in rows:
            if row["mode"] == mode and row["loop"] == "closed" and row["clients"] != 1:
                axes.axvline(row["requests_per_s"], linestyle="--", color=colour, alpha=0.5)
    axes.set_xlabel("requests per second (dashed: saturated)")
    axes.set_ylabel("time to first token, s")
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _is_open(row: dict[str, Any], mode: str) -> bool:
    return bool(row["mode"] == mode and row["loop"] == "open")
