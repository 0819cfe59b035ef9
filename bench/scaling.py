#!/usr/bin/env python3
"""Time to first token against length of the context, number of chunks, ratio, and requests at once.

The engine alone, as in `bench/stages.py`; every point of a curve is measured once per round, in turn. Full prefill is
fitted with a N + b N^2. `--png` draws the curves, `--json` prints one object.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from machine import describe_machine
from stage_work import MODES, StageWork

from kvblend.cli.models import resolve_model
from kvblend.engine.loaders.load import LoadedModel, load_model

CONTEXTS, CHUNK_COUNTS, RATIOS, CONCURRENCIES = (
    (1024, 2048, 4096, 7424),
    (2, 4, 8, 16),
    (0.0, 0.05, 0.1, 0.2, 0.4),
    (1, 2, 4),
)
CHUNK_TOKENS = 512
Point = tuple[str, float, str, Callable[[], object]]


def points_of(loaded: LoadedModel, contexts: Sequence[int], middle: int) -> list[Point]:
    """`(curve, x, mode, run)` of everything that is measured; `middle` tokens of context where that is not varied."""
    points: list[Point] = []
    for tokens in contexts:
        work = StageWork(loaded, tokens // CHUNK_TOKENS, CHUNK_TOKENS)
        points += [("context", work.num_tokens, mode, functools.partial(work.run, mode)) for mode in MODES]
    for count in CHUNK_COUNTS:
        work = StageWork(loaded, count, middle // count)
        points += [("chunks", count, mode, functools.partial(work.run, mode)) for mode in MODES if mode != "full"]
    work = StageWork(loaded, middle // CHUNK_TOKENS, CHUNK_TOKENS)
    for ratio in RATIOS:
        for name, guided in (("divergence", False), ("query", True)):
            points.append(("ratio", ratio, name, functools.partial(work.run_ratio, ratio, guided)))
    for many in CONCURRENCIES:
        points += [
            ("requests at once", many, mode, functools.partial(work.run, mode, None, many))
            for mode in MODES
            if mode != "full"
        ]
    return points


def fit_quadratic(tokens: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """a, b and the largest relative error of seconds = a N + b N^2, fitted to relative errors."""
    n, t = numpy.asarray(tokens, dtype=float), numpy.asarray(seconds, dtype=float)
    rows = numpy.stack((n, n * n), axis=1) / t[:, None]
    (a, b), *_ = numpy.linalg.lstsq(rows, numpy.ones_like(t), rcond=None)
    return float(a), float(b), float(numpy.abs(rows @ [a, b] - 1).max())


def measure(points: Sequence[Point], rounds: int) -> list[dict[str, Any]]:
    """The median of each point over `rounds`, behind one that warms up."""
    times: list[list[float]] = [[] for _ in points]
    for turn in range(rounds + 1):
        for (_, _, _, run), found in zip(points, times, strict=True):
            began = time.perf_counter()
            run()
            if turn:
                found.append(1e3 * (time.perf_counter() - began))
        print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
    return [
        {"curve": curve, "x": x, "mode": mode, "ttft_ms_median": statistics.median(found), "ttft_ms_min": min(found)}
        for (curve, x, mode, _), found in zip(points, times, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--middle", type=int, default=4096, help="tokens of context where that is not varied")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    low, high = 2 * CHUNK_TOKENS, 7680
    for tokens in (*args.contexts, args.middle):
        if not low <= tokens <= high:
            raise SystemExit(f"a context of {tokens} tokens was asked for; it must lie in {low}..{high}")
    torch.set_num_threads(args.threads)
    _, path = resolve_model(args.model)
    loaded = load_model(path, torch.float32, torch.device("cpu"))
    rows = measure(points_of(loaded, args.contexts, args.middle), args.rounds)
    full = [row for row in rows if row["curve"] == "context" and row["mode"] == "full"]
    a, b, error = fit_quadratic([row["x"] for row in full], [row["ttft_ms_median"] for row in full])
    fit = {"a_ms": a, "b_ms": b, "error_max": error}
    if args.png:
        from scaling_plot import plot

        plot(rows, args.png)
    if args.json:
        print(json.dumps({"machine": describe_machine(), "model": args.model, "rows": rows, "fit": fit}))
        return
    for row in rows:
        print(f"{row['curve']:17} {row['x']:8g} {row['mode']:16} {row['ttft_ms_median']:9.0f} ms")
    print(f"full prefill: {a:.3g} N + {b:.3g} N^2 ms, within {error:.0%}")


if __name__ == "__main__":
    main()
