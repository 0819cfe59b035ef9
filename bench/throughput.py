#!/usr/bin/env python3
"""Requests per second and times to the first token under load: full prefill, prefix reuse, plain reuse and blends.

The real engine in this process, without HTTP. Prompts are shuffled chunks of a pool that is stored beforehand; every
answer has the same number of tokens. Each mode is measured alone (one request at a time), saturated (a closed loop) and
under arrivals at Poisson's times; blends also with one sequence at a time, and over many requests for whether they get
slower. What the figures mean is in docs/throughput.md. `--json` prints `{"rows", "ratio", "decay"}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from machine import describe_machine, wait_passively
from throughput_counts import parse
from throughput_decay import Decay, measure_decay
from throughput_steps import StepLog
from throughput_work import Clients, Measured, Pool, closed_loop, medians, open_loop
from tiny import save_tiny
from ttft import cut_chunks

from kvblend.actors.messages import Mode
from kvblend.actors.settings import Settings
from kvblend.actors.system import System
from kvblend.cli.models import resolve_model

MODES: tuple[Mode, ...] = ("full", "prefix", "reuse", "blend")
SHARES: dict[tuple[Mode, float], float] = {
    ("blend", 0.3): 3.0,
    ("blend", 0.5): 1.5,
    ("blend", 0.7): 2.5,
    ("reuse", 0.3): 1.0,
    ("reuse", 0.7): 1.0,
    ("prefix", 0.6): 1.5,
    ("full", 0.6): 2.0,
}
"""Open loops: mode and share of its saturation, with the share of the time that is left for all of them."""
SERIAL = "blend/serial"


@dataclass
class Bench:
    """One run: its options, where its chunks lie, and what was measured so far."""

    args: argparse.Namespace
    model: tuple[str, Path]
    folder: Path
    began_s: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=list)
    small_texts: list[str] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"{time.monotonic() - self.began_s:5.0f} s  {text}", file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def running(self, store: str = "store", **changes: Any) -> AsyncIterator[System]:
        """The system under test; nothing is judged."""
        settings = Settings(
            **{
                "store": self.folder / store,
                "dtype": self.args.dtype,
                "store_dtype": self.args.store_dtype,
                "gate": "off",
                "blend_min_tokens": 0,
                "slow_loads": "load",
                "max_num_seqs": self.args.clients,
                "itl_ms_max": self.args.itl_ms_max,
                **changes,
            }
        )
        system = await System.start(settings, self.model[1], self.model[0])
        # the actors are there: what watches them finds them
        await system.settle()
        try:
            yield system
        finally:
            await system.close()

    def clients(self, system: System) -> Clients:
        """Clients that ask about chunks of the pool, in orders that nobody asked for before."""
        pool = Pool(self.texts, self.args.chunks, self.chance)
        return Clients(system, pool, self.args.max_tokens)

    async def warm(self, clients: Clients, modes: tuple[Mode, ...]) -> None:
        """All chunks of the pool once, and an answer per mode: what happens for the first time is not measured."""
        size, count = self.args.chunks, len(self.texts)
        firsts = range(0, count, size)
        if clients.system.settings.conditioning != "system":
            # a chunk that comes first has KV of its own there, which is stored when it comes first for the first time
            firsts = range(count)
        for first in firsts:
            await clients.ask("reuse", [(first + step) % count for step in range(size)])
        for mode in modes:
            await clients.ask(mode)
        await clients.system.settle()

    def keep(self, measured: Measured, log: StepLog, since_s: float) -> Measured:
        """Take a row, say it, and note what the device did in that time."""
        self.measured.append(measured)
        row, steps = measured.row(), log.summary(since_s, time.monotonic())
        where = f"{measured.mode} {measured.loop} {measured.rate or measured.clients}"
        self.details.setdefault("steps", {})[where] = {
            **steps,
            "cpu_s_per_request": measured.cpu_s / len(measured.answers),
        }
        self.say(
            f"{measured.mode:12} {measured.loop:6} {measured.rate or measured.clients:7.3g}: {len(measured.answers):4} "
            f"requests, {row['requests_per_s']:.3f}/s, first token {row['ttft_p50_ms']:.0f} ms "
            f"(p99 {row['ttft_p99_ms']:.0f}), device {100 * steps['busy']:.0f} % busy, "
            f"{steps['prefills_per_step']:.2f} prompts and {steps['decodes_per_step']:.1f} tokens a step"
        )
        return measured

    async def alone(self, clients: Clients, log: StepLog) -> dict[str, Measured]:
        """One request at a time, the modes in turn."""
        rows = [(mode, Measured(mode, "closed", None, 1)) for mode in MODES]
        since = time.monotonic()
        for _ in range(self.args.rounds):
            for mode, measured in rows:
                cpu = time.process_time()
                measured.answers.append(await clients.ask(mode))
                measured.cpu_s += time.process_time() - cpu
        for _, measured in rows:
            measured.seconds = sum(answer.total_s for answer in measured.answers)
            self.keep(measured, log, since)
        return {f"{mode} alone": measured for mode, measured in rows}

    async def saturate(self) -> dict[str, Measured]:
        """Every mode alone and with all clients at once; blends with one sequence at a time as well."""
        args = self.args
        async with self.running() as system:
            self.texts = cut_chunks(system._engine.tokenizer, args.pool, args.chunk_tokens)
            self.small_texts = cut_chunks(system._engine.tokenizer, args.decay_pool, args.decay_chunk_tokens)
            clients, log = self.clients(system), StepLog.of(system)
            await clients.store()
            await self.warm(clients, MODES)
            self.say(f"{args.pool} chunks of {args.chunk_tokens} tokens are stored")
            out = await self.alone(clients, log)
            counts: list[tuple[Mode, int]] = [("prefix", args.prefixes), ("reuse", args.reuses)]
            # the two that are compared stand next to each other, should the machine change its speed
            for mode, count in [*counts, ("full", args.fulls), ("blend", args.blends)]:
                since = time.monotonic()
                out[mode] = self.keep(await closed_loop(clients, mode, args.clients, count), log, since)
            self.details["costs"], self.details["layers"] = log.fit(), log.layers
            self.details["layer_token_bytes"] = system._store.shape.layer_bytes(1)
        async with self.running(max_num_seqs=1) as system:
            clients, log = self.clients(system), StepLog.of(system)
            await self.warm(clients, ("blend",))
            since = time.monotonic()
            serial = await closed_loop(clients, "blend", args.clients, args.serials, SERIAL)
            out[SERIAL] = self.keep(serial, log, since)
        return out

    async def arrive(self, saturated: dict[str, Measured]) -> None:
        """Open loops in the time that is left, at shares of what each mode's closed loop did."""
        args = self.args
        left = max(args.open_s_min, 60 * args.minutes - (time.monotonic() - self.began_s))
        async with self.running() as system:
            clients, log = self.clients(system), StepLog.of(system)
            began = time.monotonic()
            await self.warm(clients, ("blend",))
            left -= time.monotonic() - began
            chosen = {key: weight for key, weight in SHARES.items() if key[0] in args.open}
            for (mode, share), weight in chosen.items():
                rate = share * saturated[mode].requests_per_s
                # the last ones to arrive are answered after the slot
                slot = left * weight / sum(chosen.values()) - 2.0 / saturated[mode].requests_per_s
                count, since = max(2, round(slot * rate)), time.monotonic()
                self.keep(await open_loop(clients, mode, rate, count, self.chance), log, since)

    async def decay(self) -> Decay:
        """Many requests over a pool of small chunks that does not fit into host memory."""
        args = self.args
        chunk_bytes = self.details["layers"] * self.details["layer_token_bytes"] * args.decay_chunk_tokens

        def start(**changes: Any) -> Any:
            return self.running("zipf", **changes)

        counts = args.clients, args.decays, args.decay_tokens
        out = await measure_decay(start, self.small_texts, chunk_bytes, *counts, seed=1)
        self.measured.append(out.measured)
        quarters = ", ".join(f"{rate:.2f}" for rate in out.quarters)
        self.say(f"decay: {quarters} requests/s by quarters; {out.chunks_end} chunks stored, {out.misses} misses")
        self.details["decay"] = out.figures()
        return out


def ratios(measured: dict[str, Measured], details: dict[str, Any]) -> dict[str, float]:
    """The three ratios, from saturated requests per second and the same run's unloaded times."""
    full_s, decode_full = medians(measured["full alone"].answers)
    blend_s, decode_blend = medians(measured["blend alone"].answers)
    decode_s = (decode_full + decode_blend) / 2
    predicted = (full_s + decode_s) / (blend_s + decode_s)
    gain = measured["blend"].requests_per_s / measured["full"].requests_per_s
    details["unloaded"] = {"full_s": full_s, "blend_s": blend_s, "decode_s": decode_s, "predicted": predicted}
    return {
        "blend/full": gain,
        "blend/predicted": gain / predicted,
        "packed/serial": measured["blend"].requests_per_s / measured[SERIAL].requests_per_s,
    }


async def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole benchmark: what `--json` prints, and everything else that was seen."""
    with tempfile.TemporaryDirectory() as root:
        model = ("tiny", save_tiny(Path(root) / "model")) if args.quick else resolve_model(args.model)
        bench = Bench(args, model, Path(root))
        saturated = await bench.saturate()
        ratio = ratios(saturated, bench.details)
        decay = await bench.decay()
        await bench.arrive(saturated)
        bench.say(f"done: {ratio}, decay {decay.decay:.3f}")
    result = {"rows": [measured.row() for measured in bench.measured], "ratio": ratio, "decay": decay.decay}
    seen = [
        {**measured.row(), "requests": len(measured.answers), "arrivals_s": measured.arrivals_s}
        for measured in bench.measured
    ]
    details = {"machine": describe_machine(), "model": model[0], "options": vars(args), "rows": seen, **bench.details}
    return result, details


def main() -> None:
    args = parse(__doc__ or "")
    wait_passively()
    result, details = uvloop.run(run(args))
    if args.plot:
        from throughput_plot import plot

        plot(result["rows"], args.plot)
    if args.details:
        args.details.write_text(json.dumps(details, indent=1, default=str))
    if args.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        rate = f"{row['rate']:.3f}/s" if row["clients"] is None else f"{row['clients']} clients"
        itl = "" if row["itl_p99_ms"] is None else f", tokens p99 {row['itl_p99_ms']:.0f} ms"
        print(f"{row['mode']:12} {row['loop']:6} {rate:>11} {row['requests_per_s']:8.3f} requests/s, first token "
              f"{row['ttft_p50_ms']:.0f} ms, p99 {row['ttft_p99_ms']:.0f} ms{itl}")  # fmt: skip
    print(f"ratios: {result['ratio']}")
    print(f"decay: {result['decay']:.3f}")


if __name__ == "__main__":
    main()
