"""A forecast of what `bench/throughput.py` measured: the same arrivals on a device with the costs it found."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from kvblend.actors.core.limits import Limits
from kvblend.actors.messages import Finished
from simulation.device import DeviceCosts
from simulation.disk import DiskCosts
from simulation.figures import quantile
from simulation.workload import Workload
from simulation.world import World

REPEATS = 25


class BadDetails(ValueError):
    """The file is none that `bench/throughput.py --details` has written."""


def read_details(path: Path) -> dict[str, Any]:
    """The details of a run. Raises BadDetails, naming what is missing; OSError where there is no file."""
    try:
        details = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadDetails(f"{path} is no JSON: {error}") from None
    for name in ("costs", "options", "rows", "layers", "layer_token_bytes"):
        if not isinstance(details, dict) or name not in details:
            raise BadDetails(f"{path} has no {name!r}; it must come from bench/throughput.py --details")
    return dict(details)


def costs_of(details: Mapping[str, Any]) -> DeviceCosts:
    """What steps, rows and keys cost on the measured device."""
    found = details["costs"]
    return DeviceCosts(**{field.name: found.get(field.name, 0.0) for field in fields(DeviceCosts)})


def forecast(details: Mapping[str, Any], limits: Limits, disk: DiskCosts) -> list[dict[str, Any]]:
    """Every open loop that was measured, with the simulated first token beside the measured one.

    The requests come at the very times at which they came there: at other times of the same rate the 99th percentile
    of so few can be twice as high. They are simulated `REPEATS` times, with other chunks: medians.
    """
    options, out = details["options"], []
    limits = replace(limits, num_layers=details["layers"], layer_token_bytes=details["layer_token_bytes"])
    limits = replace(limits, max_num_seqs=options["clients"], itl_ms_max=options.get("itl_ms_max") or None)
    for row in details["rows"]:
        if row["loop"] != "open":
            continue
        p50, p99 = [], []
        for seed in range(REPEATS):
            load = Workload(
                requests=row["requests"],
                rate=row["rate"],
                mode=row["mode"],
                pool=options["pool"],
                zipf=0.0,
                chunks=options["chunks"],
                chunk_tokens=options["chunk_tokens"],
                max_tokens=options["max_tokens"],
                burst=1.0,
                clients=1,
                seed=seed,
                arrivals_s=tuple(row.get("arrivals_s", ())),
            )
            world = World(limits, load, costs_of(details), disk)
            world.store_all(in_memory=True)
            ends = [one.terminal for one in world.run().ended]
            first = sorted(end.usage.ttft_ms for end in ends if isinstance(end, Finished))
            p50.append(quantile(first, 0.5))
            p99.append(quantile(first, 0.99))
        mine = {"forecast_p50_ms": statistics.median(p50), "forecast_p99_ms": statistics.median(p99)}
        out.append({**row, **mine, "p99_off": statistics.median(p99) / row["ttft_p99_ms"] - 1.0})
    return out


def forecast_table(rows: list[dict[str, Any]]) -> Table:
    """Measured and simulated, side by side."""
    out = Table()
    for name in ("mode", "arrivals/s", "requests", "p50 ms", "forecast", "p99 ms", "forecast", "off"):
        out.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        numbers = [row[name] for name in ("ttft_p50_ms", "forecast_p50_ms", "ttft_p99_ms", "forecast_p99_ms")]
        off = f"{100 * row['p99_off']:+.0f} %"
        out.add_row(row["mode"], f"{row['rate']:.3f}", str(row["requests"]), *(f"{n:,.0f}" for n in numbers), off)
    return out
