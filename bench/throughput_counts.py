"""The options of `bench/throughput.py`: how much of everything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

COUNTS = {
    "pool": (12, "chunks of the pool"),
    "chunks": (6, "chunks per prompt"),
    "chunk-tokens": (512, "tokens per chunk"),
    "max-tokens": (16, "tokens per answer"),
    "clients": (16, "requests under way in a closed loop, and sequences at a time"),
    "rounds": (3, "unloaded requests per mode"),
    "fulls": (6, "requests of the saturated full prefill"),
    "prefixes": (4, "requests of the saturated prefix reuse"),
    "reuses": (16, "requests of the saturated plain reuse"),
    "blends": (32, "requests of the saturated blend"),
    "serials": (10, "requests of the blend with one sequence at a time"),
    "decays": (600, "requests of the run that looks for decay"),
    "decay-pool": (96, "chunks of that run's pool"),
    "decay-chunk-tokens": (96, "tokens per chunk in that run"),
    "decay-tokens": (1, "tokens per answer in that run"),
}
OPEN = ["blend", "reuse", "prefix", "full"]
QUICK = {
    "chunk-tokens": 24, "max-tokens": 4, "clients": 4, "rounds": 1, "fulls": 6, "prefixes": 4, "reuses": 6, "blends": 8,
    "serials": 4, "decays": 24, "decay-pool": 48, "decay-chunk-tokens": 12,
}  # fmt: skip


def parse(about: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The options; `--quick` changes the defaults of the counts."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--store-dtype", choices=["auto", "float32", "bfloat16", "int8"], default="bfloat16")
    parser.add_argument(
        "--itl-ms-max", type=float, default=0.0, metavar="MS", help="the server's setting (0: no bound)"
    )
    for name, (default, text) in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{text} ({default})", metavar="N")
    parser.add_argument("--minutes", type=float, default=13.0, help="open loops end about then (13)")
    parser.add_argument("--open-s-min", type=float, default=90.0, help="seconds that open loops get at least (90)")
    parser.add_argument(
        "--open", nargs="+", choices=OPEN, default=OPEN, help="modes that have open loops (all)", metavar="MODE"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny random model and small counts: only to see it work"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw first token against arrivals as PNG")
    parser.add_argument("--details", type=Path, metavar="FILE", help="write what the device did and what rows cost")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    if args.quick:
        args.minutes, args.open_s_min = 0.0, min(args.open_s_min, 4.0)
    for name, (default, _) in COUNTS.items():
        field_name = name.replace("-", "_")
        if getattr(args, field_name) is None:
            setattr(args, field_name, QUICK.get(name, default) if args.quick else default)
        if getattr(args, field_name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.pool < args.chunks:
        parser.error(f"--pool {args.pool} is smaller than --chunks {args.chunks}")
    if args.decays < 4:
        parser.error("--decays must be at least 4")
    return args
