#!/usr/bin/env python3
"""Where the time of one prompt goes, stage by stage, against counted operations at this machine's measured rates.

The engine runs one prompt after another without a server around it; chunks' KV are random numbers, so nothing but time
is measured. The bound is operations divided by rates: of GEMMs with the same number of rows, of causal attention over
the whole prompt. Projections that no attention follows are left out of it, and so is the last layer, of which one row
counts. Stages without operations (decode, residual, copies, Python) have no bound. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from machine import describe_machine
from stage_clock import StageClock
from stage_work import MODES, StageWork

from kvblend.cli.models import resolve_model
from kvblend.engine.config import ModelConfig
from kvblend.engine.loaders.load import load_model


def fastest(run: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of some runs, behind one that warms up."""
    run()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def layer_flops(config: ModelConfig) -> int:
    """Operations of one row's GEMMs in one layer."""
    h, d = config.hidden_size, config.head_dim
    qkv = h * (config.num_heads + 2 * config.num_kv_heads) * d
    return 2 * (qkv + config.num_heads * d * h + 3 * h * config.intermediate_size)


@torch.inference_mode()
def gemm_rate(config: ModelConfig, rows: int) -> float:
    """Operations per second of the GEMMs of a layer at this many rows; several layers' weights, as in a model."""
    h, f, q = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    shapes = [(h, q + 2 * kv), (q, h), (h, 2 * f), (f, h)] * 4
    weights = [torch.randn(out, size) for size, out in shapes]
    inputs = {size: torch.randn(rows, size) for size in {size for size, _ in shapes}}

    def run() -> None:
        for (size, _), weight in zip(shapes, weights, strict=True):
            F.linear(inputs[size], weight)

    return 4 * rows * layer_flops(config) / fastest(run)


@torch.inference_mode()
def attention_rate(config: ModelConfig, tokens: int) -> float:
    """Operations per second of causal attention over `tokens`, counted causally."""
    q = torch.randn(1, config.num_heads, tokens, config.head_dim)
    seconds = fastest(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), 2)
    return attention_flops(config, tokens * (tokens + 1) // 2) / seconds


def attention_flops(config: ModelConfig, pairs: int) -> int:
    """Operations of attention over `pairs` of a query and a key that it sees, in one layer."""
    return 4 * config.num_heads * config.head_dim * pairs


def bound_of(
    config: ModelConfig, passes: list[tuple[int, int]], gemm: dict[int, float], attention: float
) -> dict[str, float]:
    """Seconds of GEMMs and of attention. `passes` are `(rows, pairs)` of each layer that was run."""
    return {
        "gemm": sum(rows * layer_flops(config) / gemm[rows] for rows, _ in passes),
        "attention": sum(attention_flops(config, pairs) / attention for _, pairs in passes),
    }


def measure(work: StageWork, mode: str, rounds: int, attention: float) -> dict[str, Any]:
    """One mode: total, bound and every stage."""
    work.run(mode)
    wall = []
    for _ in range(rounds):
        began = time.perf_counter()
        work.run(mode)
        wall.append(time.perf_counter() - began)
    with StageClock() as clock:
        passes = work.run(mode, clock)
    config = work.config
    rates = {rows: gemm_rate(config, rows) for rows in {rows for rows, _ in passes}}
    bound = bound_of(config, passes, rates, attention)
    arithmetic = clock.seconds["gemm"] + clock.seconds["attention"]
    total = sum(clock.seconds.values())
    return {
        "mode": mode,
        "tokens": work.num_tokens,
        "ms_median": 1e3 * statistics.median(wall),
        "bound_ms": {name: 1e3 * seconds for name, seconds in bound.items()},
        "over_bound": statistics.median(wall) / sum(bound.values()),
        "share_without_operations": 1 - arithmetic / total,
        "stages_ms": {name: 1e3 * seconds for name, seconds in sorted(clock.seconds.items(), key=lambda x: -x[1])},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, path = resolve_model(args.model)
    work = StageWork(load_model(path, torch.float32, torch.device("cpu")), args.chunks, args.chunk_tokens)
    attention = attention_rate(work.config, work.num_tokens)
    rows = [measure(work, mode, args.rounds, attention) for mode in args.modes]
    result = {"machine": describe_machine(), "model": args.model, "attention_gflops": attention / 1e9, "rows": rows}
    if args.json:
        print(json.dumps(result))
        return
    for row in rows:
        print(f"{row['mode']}: {row['ms_median']:.0f} ms, {row['over_bound']:.2f} times its bound "
              f"({row['bound_ms']['gemm']:.0f} GEMM + {row['bound_ms']['attention']:.0f} attention), "
              f"{row['share_without_operations']:.0%} of it without counted operations")  # fmt: skip
        for name, ms in row["stages_ms"].items():
            print(f"    {name:12} {ms:9.1f} ms")


if __name__ == "__main__":
    main()
