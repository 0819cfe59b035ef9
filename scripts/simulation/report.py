"""Simulated runs side by side: a table, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from simulation.figures import first_tokens, over_time
from simulation.world import Outcome


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One column per policy."""
    out = Table()
    out.add_column("")
    for result in results:
        out.add_column(str(result["policy"]), justify="right")
    for name in ("wait_s", "first_token_s", "total_s"):
        label = {"wait_s": "waiting", "first_token_s": "first token", "total_s": "whole answer"}[name]
        for part in ("mean", "p50", "p99", "max"):
            values = [None if r[name] is None else r[name][part] for r in results]
            out.add_row(f"{label}, {part}, s", *(_number(value) for value in values))
    rows = {
        "answers per second": "requests_per_s",
        "chunks found": "chunk_hit_ratio",
        "found in memory": "memory_hit_ratio",
        "deadlines met": "deadlines_met",
        "device busy": "device_busy",
        "simulated hours": "simulated_s",
        "events": "events",
        "events per processor second": "events_per_s",
    }
    for label, name in rows.items():
        scale = 1 / 3600 if name == "simulated_s" else 1
        out.add_row(label, *(_number(None if r[name] is None else scale * r[name]) for r in results))
    endings = sorted({code for result in results for code in result["endings"]})
    for code in endings:
        out.add_row(
            f"requests {code.replace('_', ' ')}", *(f"{result['endings'].get(code, 0):,}" for result in results)
        )
    return out


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def plot(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Three panels: time to the first token; answers per second and the share found in memory, over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.2))
    waiting, rate, hits = figure.subplots(1, 3)
    for name, outcome in outcomes.items():
        ordered = first_tokens(outcome)
        waiting.plot(ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], label=name)
        series = over_time(outcome)
        hours = [at_s / 3600 for at_s in series["at_s"]]
        rate.plot(hours, series["requests_per_s"], label=name)
        hits.plot(hours, series["memory_hit_ratio"], label=name)
    waiting.set_xscale("log")
    waiting.set_xlabel("seconds to the first token")
    waiting.set_ylabel("share of the answers")
    for panel, label in ((rate, "answers per second"), (hits, "share found in memory")):
        panel.set_xlabel("hours")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    for panel in (waiting, rate, hits):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
