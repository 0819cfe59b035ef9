#!/usr/bin/env python3
"""Time between the tokens of running answers: alone, beside a cold prompt, and beside a blend, per `itl_ms_max`.

The real engine in this process, without HTTP. Greedy answers run until they are stopped; beside them one prompt is
prefilled, whose first token ends the measurement. `auto` bounds steps by twice what a token takes alone, less a
seventh: gaps end a little later than the steps they wait for. `--json` prints `{"machine", "model", "rows",
"ratio"}`; what the figures mean is in docs/throughput.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop
from machine import describe_machine, wait_passively
from throughput import Bench
from throughput_work import Clients, Pool, percentile
from tiny import save_tiny
from ttft import cut_chunks

from kvblend.actors.messages import Delta, Generate, Mode, Sampling
from kvblend.actors.streams import TokenStream
from kvblend.actors.system import System
from kvblend.cli.models import resolve_model

AUTO = "auto"
RATIO_WANTED = 2.0
SAFETY = 0.85
FULL = {"prompt_tokens": 6000, "chunk_tokens": 512, "streams": [1, 4], "tokens": 40, "itl_ms_max": [AUTO, 1000.0]}
QUICK = {"prompt_tokens": 800, "chunk_tokens": 64, "streams": [1, 2], "tokens": 20, "itl_ms_max": [AUTO, 1000.0]}
ANSWER_TOKENS = 3000
"""More than a measurement takes: no answer ends by itself."""
BESIDE: tuple[tuple[str, Mode], ...] = (("prompt", "full"), ("blend", "blend"))


@dataclass(slots=True)
class Gap:
    """When a token came (seconds of the clock) and how long after the one before it."""

    at_s: float
    ms: float


@dataclass(slots=True)
class Running:
    """An answer that goes on until it is stopped; its gaps so far."""

    stream: TokenStream
    gaps: list[Gap] = field(default_factory=list)

    async def read(self) -> None:
        """Take every piece as it comes. Tokens without text come with the next piece and share its time."""
        before: float | None = None
        async for event in self.stream:
            if not isinstance(event, Delta):
                continue
            now, count = time.perf_counter(), max(1, len(event.token_ids))
            if before is not None:
                self.gaps += [Gap(now, 1e3 * (now - before) / count)] * count
            before = now


@contextlib.asynccontextmanager
async def answers(clients: Clients, count: int) -> AsyncIterator[list[Running]]:
    """`count` greedy answers that run until the end of the block."""
    running = []
    for number in range(count):
        sampling = Sampling(max_tokens=clients.max_tokens, ignore_eos=True)
        request: Generate = replace(clients.request("full", ()), request_id=f"running{number}", sampling=sampling)
        running.append(Running(await clients.system.submit(request)))
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(one.read()) for one in running]
        try:
            yield running
        finally:
            for one, reader in zip(running, readers, strict=True):
                one.stream.abandon()
                reader.cancel()
    await clients.system.settle()


async def hear(running: Sequence[Running], tokens: int) -> float:
    """Wait until every answer has said so many more tokens; the time it began. RuntimeError where one has ended."""
    began, wanted = time.perf_counter(), [len(one.gaps) + tokens for one in running]
    while any(len(one.gaps) < count for one, count in zip(running, wanted, strict=True)):
        if any(one.stream.terminal is not None for one in running):
            raise RuntimeError("an answer ended before it had said enough")
        await asyncio.sleep(0.01)
    return began


def row(running: Sequence[Running], since_s: float, until_s: float, alone_ms: float | None = None) -> dict[str, Any]:
    """The gaps that ended within these moments; `ratio` is the 99th percentile over the median of the answers alone.

    ValueError where there is none.
    """
    gaps = [gap.ms for one in running for gap in one.gaps if since_s <= gap.at_s <= until_s]
    if not gaps:
        raise ValueError("no token came in that time")
    found = {f"itl_p{share}_ms": percentile(gaps, share) for share in (50, 99)}
    ratio = None if alone_ms is None else found["itl_p99_ms"] / alone_ms
    return {"gaps": len(gaps), **found, "itl_max_ms": max(gaps), "ratio": ratio, "ttft_ms": None}


@dataclass
class Measurement:
    """Rows of one run of the benchmark, on the systems that `bench` starts."""

    bench: Bench
    rows: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self, bound_ms: float) -> AsyncIterator[System]:
        """A system with this bound that has computed everything once; nothing is kept of what has ended."""
        args = self.bench.args
        async with self.bench.running(itl_ms_max=bound_ms, kept_tokens_max=0, max_num_seqs=args.clients) as system:
            if not self.texts:
                # the text of the prompt beside them is none of the chunks
                cut = cut_chunks(system._engine.tokenizer, 1, args.prompt_tokens + args.chunks * args.chunk_tokens)[0]
                ids = system._engine.tokenizer.encode(cut, special=False)
                chunks = cut_chunks(system._engine.tokenizer, args.chunks, args.chunk_tokens)
                self.texts = chunks
                await self.clients(system).store()
                self.texts = [*chunks, system._engine.tokenizer.decode(ids[-args.prompt_tokens :])]
            clients = self.clients(system)
            await clients.ask("full", [0])
            await clients.ask("blend", range(args.chunks)[::-1])
            await system.settle()
            yield system

    def clients(self, system: System, max_tokens: int = 1) -> Clients:
        """Who asks about the texts."""
        return Clients(system, Pool(self.texts, 1, self.bench.chance), max_tokens)

    def keep(self, found: dict[str, Any], streams: int, beside: str, bound: float | str, bound_ms: float) -> None:
        """Take a row, and say it."""
        self.rows.append({"streams": streams, "beside": beside, "bound": bound, "itl_ms_max": bound_ms, **found})
        self.bench.say(line(self.rows[-1]))

    async def alone_ms(self, streams: Sequence[int]) -> dict[int, float]:
        """The median gap of so many answers, without a bound and anything beside them."""
        out = {}
        async with self.running(0.0) as system:
            for count in streams:
                async with answers(self.clients(system, self.bench.args.answer_tokens), count) as running:
                    began = await hear(running, self.bench.args.tokens)
                    out[count] = row(running, began, time.perf_counter())["itl_p50_ms"]
        return out

    async def measure(self, streams: int, bound: float | str, alone_ms: float) -> None:
        """So many answers under one bound: alone, then beside each prompt, with some tokens between."""
        args = self.bench.args
        bound_ms = SAFETY * RATIO_WANTED * alone_ms if bound == AUTO else float(bound)
        async with self.running(bound_ms) as system:
            asking = self.clients(system)
            async with answers(self.clients(system, args.answer_tokens), streams) as running:
                began = await hear(running, args.tokens)
                alone = row(running, began, time.perf_counter())
                self.keep(alone, streams, "nothing", bound, bound_ms)
                for beside, mode in BESIDE:
                    order = range(args.chunks) if mode == "blend" else [args.chunks]
                    began = time.perf_counter()
                    answer = await asking.ask(mode, order)
                    # the step of its first token gave theirs too, which may be told of a moment later
                    await hear(running, 1)
                    found = row(running, began, time.perf_counter(), alone["itl_p50_ms"])
                    self.keep({**found, "ttft_ms": 1e3 * answer.ttft_s}, streams, beside, bound, bound_ms)
                    await hear(running, 5)


def line(found: dict[str, Any]) -> str:
    """A row for people."""
    text = (
        f"{found['streams']} running, itl_ms_max {found['itl_ms_max']:.0f}, beside {found['beside']}: "
        f"gap p50 {found['itl_p50_ms']:.0f} ms, p99 {found['itl_p99_ms']:.0f}, longest {found['itl_max_ms']:.0f} "
        f"({found['gaps']} gaps)"
    )
    if found["ratio"] is None:
        return text
    return f"{text}, ratio {found['ratio']:.2f}, first token of the {found['beside']} {found['ttft_ms'] / 1e3:.1f} s"


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark: what `--json` prints. `ratio` is the highest one of the automatic bounds, None without."""
    with tempfile.TemporaryDirectory() as root:
        model = ("tiny", save_tiny(Path(root) / "model")) if args.quick else resolve_model(args.model)
        measurement = Measurement(Bench(args, model, Path(root)))
        alone_ms = await measurement.alone_ms(args.streams)
        for streams in args.streams:
            for bound in args.itl_ms_max:
                await measurement.measure(streams, bound, alone_ms[streams])
    ratios = [found["ratio"] for found in measurement.rows if found["bound"] == AUTO and found["ratio"] is not None]
    return {
        "machine": describe_machine(),
        "model": model[0],
        "rows": measurement.rows,
        "ratio": max(ratios, default=None),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; what measures nothing ends with a message and code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--store-dtype", choices=["auto", "float32", "bfloat16", "int8"], default="bfloat16")
    add("--streams", type=int, nargs="+", metavar="N", help="answers that run at once (1 4)")
    add("--itl-ms-max", nargs="+", metavar="MS", help="the server's setting, 0: no bound, auto: see above (auto 1000)")
    add("--prompt-tokens", type=int, metavar="N", help="tokens of the cold prompt (6000)")
    add("--chunks", type=int, default=8, metavar="N", help="chunks of the blend (8)")
    add("--chunk-tokens", type=int, metavar="N", help="tokens per chunk (512)")
    add("--tokens", type=int, metavar="N", help="tokens that each answer says alone (40)")
    add("--quick", action="store_true", help="a tiny random model and small prompts: only to see it work")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    args = parser.parse_args(argv)
    for name, default in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name in ("prompt_tokens", "chunks", "chunk_tokens", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if min(args.streams) < 1:
        parser.error(f"--streams is {min(args.streams)}; it must be at least 1")
    try:
        args.itl_ms_max = [bound if bound == AUTO else float(bound) for bound in args.itl_ms_max]
    except ValueError as error:
        parser.error(f"--itl-ms-max: {error}; it must be a number or {AUTO}")
    if any(bound != AUTO and not bound >= 0 for bound in args.itl_ms_max):
        parser.error("--itl-ms-max must not be negative")
    args.clients, args.answer_tokens = max(args.streams) + 1, ANSWER_TOKENS
    return args


def main() -> None:
    args = parse()
    wait_passively()
    result = uvloop.run(run(args))
    if args.json:
        print(json.dumps(result))
        return
    for found in result["rows"]:
        print(line(found))
    if result["ratio"] is not None:
        print(f"ratio: {result['ratio']:.2f} (at most {RATIO_WANTED:g} wanted)")


if __name__ == "__main__":
    main()
