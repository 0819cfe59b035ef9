"""`scripts/simulate_load.py`: options, runs, output."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rich.console import Console

from kvblend.actors.core.limits import Limits
from kvblend.actors.messages import MODES
from simulation.device import DeviceCosts
from simulation.disk import DiskCosts
from simulation.figures import summarize
from simulation.forecast import BadDetails, costs_of, forecast, forecast_table, read_details
from simulation.report import plot, table
from simulation.workload import Workload
from simulation.world import Outcome, World

POLICIES: tuple[str, ...] = get_args(get_type_hints(Limits)["policy"])
ABOUT = """Simulates a server under load: the scheduler's and the loader's real cores, with device and disk as models.

The device takes a fixed time per step, and time per row and layer and per key that a row sees; the disk has a speed.
Requests ask about chunks of a Zipf pool, at Poisson's times or in bursts; every policy gets the same requests. The same
seed gives the same figures. See docs/throughput.md.
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; what makes no sense ends with a message and code 2."""
    parser = argparse.ArgumentParser(
        prog="simulate_load.py", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    load, device, disk = Workload(), DeviceCosts(), DiskCosts()
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help=f"({' '.join(POLICIES)})")
    for name, text in (
        ("requests", "requests to simulate"),
        ("pool", "chunks there are"),
        ("chunks", "chunks per prompt"),
        ("chunk-tokens", "tokens per chunk"),
        ("question-tokens", "tokens of a question"),
        ("max-tokens", "tokens of an answer"),
        ("clients", "who asks: clients share the server fairly"),
        ("seed", "of everything that is drawn"),
    ):
        default = getattr(load, name.replace("-", "_"))
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    for name, text in (
        ("rate", "requests per second"),
        ("ratio", "share of the cached rows that is recomputed"),
        ("zipf", "exponent of the chunks' frequencies"),
        ("burst", "how many times as many requests come in a burst"),
        ("burst-share", "share of the time that is burst"),
        ("burst-s", "mean seconds of a burst"),
        ("deadline-share", "share of the requests that have a deadline"),
    ):
        default = getattr(load, name.replace("-", "_"))
        add(f"--{name}", type=float, default=default, metavar="X", help=f"{text} ({default:g})")
    add("--deadline-s", type=float, nargs=2, default=list(load.deadline_s), metavar=("LOW", "HIGH"), help="(10 60)")
    add("--mode", choices=MODES, default=load.mode)
    for costs, names in ((device, DEVICE_NAMES), (disk, DISK_NAMES)):
        for name in names:
            default = getattr(costs, name)
            add(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="X", help=f"({default:g})")
    add("--costs", type=Path, metavar="FILE", help="take the device's costs from bench/throughput.py --details FILE")
    add("--forecast", type=Path, metavar="FILE", help="simulate what that run measured, and compare")
    add("--cold", action="store_true", help="nothing is stored beforehand: chunks are computed when first asked about")
    add("--layers", type=int, default=30, metavar="N", help="layers of the model (30)")
    add("--layer-token-bytes", type=int, default=768, metavar="N", help="bytes of a token's KV in a layer (768)")
    add("--max-num-seqs", type=int, default=16, metavar="N", help="(16)")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="(8192)")
    add("--kv-tokens-max", type=int, default=131072, metavar="N", help="(131072)")
    add("--queue-requests-max", type=int, default=256, metavar="N", help="(256)")
    add("--itl-ms-max", type=float, metavar="MS", help="bound on a step that running answers wait for")
    add("--ratio-lever-floor", type=float, metavar="R", help="how low load may press the ratio")
    add("--plot", type=Path, metavar="FILE", help="draw waiting, throughput and hits per policy as PNG")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    check(parser, args)
    return args


DEVICE_NAMES = tuple(field.name for field in fields(DeviceCosts))
DISK_NAMES = tuple(field.name for field in fields(DiskCosts))


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message that names the option, its value and its limit."""
    at_least_one = ("requests", "pool", "chunks", "chunk_tokens", "question_tokens", "max_tokens", "clients", "layers")
    for name in (*at_least_one, "max_num_seqs", "max_num_batched_tokens", "queue_requests_max", "layer_token_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    for name in ("rate", "burst", "burst_s", "read_bytes_per_s", "write_bytes_per_s"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name):g}; it must be above 0")
    for name in (*DEVICE_NAMES, "zipf", "latency_s", "lookup_s"):
        if not getattr(args, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name):g}; it must not be negative")
    for name in ("ratio", "burst_share", "deadline_share"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name):g}; it must lie in 0..1")
    if args.chunks > args.pool:
        parser.error(f"--chunks {args.chunks} are more than --pool {args.pool}")
    if not 0 < args.deadline_s[0] <= args.deadline_s[1]:
        parser.error(f"--deadline-s is {args.deadline_s}; it must be two numbers above 0, the smaller one first")


def limits_of(args: argparse.Namespace, policy: str) -> Limits:
    """What the scheduler's core may use."""
    return Limits(
        pages=-(-args.kv_tokens_max // 16),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        blend_min_tokens=0,
        num_layers=args.layers,
        layer_token_bytes=args.layer_token_bytes,
        ratio_floor=args.ratio,
        computes_slow_loads=False,
        itl_ms_max=args.itl_ms_max,
        ratio_lever_floor=args.ratio_lever_floor,
        policy=policy,  # type: ignore[arg-type]  # argparse has checked it
    )


def workload_of(args: argparse.Namespace) -> Workload:
    """What arrives."""
    values = {field.name: getattr(args, field.name) for field in fields(Workload) if hasattr(args, field.name)}
    return Workload(**{**values, "deadline_s": tuple(args.deadline_s)})


def simulate(args: argparse.Namespace, policy: str) -> Outcome:
    """One policy's run."""
    costs = DeviceCosts(**{name: getattr(args, name) for name in DEVICE_NAMES})
    if args.costs is not None:
        costs = costs_of(read_details(args.costs))
    disk = DiskCosts(**{name: getattr(args, name) for name in DISK_NAMES})
    world = World(limits_of(args, policy), workload_of(args), costs, disk, args.queue_requests_max)
    if not args.cold:
        world.store_all()
    return world.run()


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 when done, 2 for a file that cannot be used."""
    args = parse(argv)
    console, result = Console(), dict[str, Any]()
    try:
        if args.forecast is not None:
            disk = DiskCosts(**{name: getattr(args, name) for name in DISK_NAMES})
            rows = forecast(read_details(args.forecast), limits_of(args, args.policies[0]), disk)
            if args.json:
                print(json.dumps({"rows": rows}))
            else:
                console.print(forecast_table(rows))
            return 0
        outcomes = {}
        for policy in args.policies:
            outcomes[policy] = simulate(args, policy)
            result[policy] = summarize(outcomes[policy], policy)
            print(f"{policy}: {result[policy]['events_per_s']:,.0f} events/s", file=sys.stderr, flush=True)
    except (BadDetails, OSError) as error:
        print(f"simulate_load.py: error: {error}", file=sys.stderr)
        return 2
    if args.plot is not None:
        plot(outcomes, args.plot)
    if args.json:
        print(json.dumps({"policies": list(result.values())}))
    else:
        console.print(table(list(result.values())))
    return 0
