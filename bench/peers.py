#!/usr/bin/env python3
"""The same prompts over retrieved chunks on kvblend and on other engines: first token, requests per second, KL.

Every engine is a process of its own that waits on its stdin, so that only one computes at a time. All modes run once
per round, in turn; ratios are of medians. A peer is found in `.peers/NAME/bin/python` or named with `--peer
NAME=PYTHON`; transformers is also taken from the Python that runs this. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import ROOT, describe_machine, real_text
from peer_figures import own_row, peer_row, ratios
from peer_kl import mean_kl
from peer_own import MODES
from peer_process import EngineProcess, find_peers
from ttft import Reference, cut_chunks

from kvblend.actors.settings import DEFAULT_SYSTEM
from kvblend.cli.models import resolve_model
from kvblend.engine.loaders.load import LoadedModel, load_model
from kvblend.engine.prompt import PromptDocument, build_prompt

QUESTIONS = (
    "What is stored for every chunk, and what is computed again?",
    "How are positions of stored keys handled when chunks move?",
    "Which parts of the system may wait, and for what?",
    "What happens to a request when a stored chunk is missing?",
)
CORPUS_TOKENS = 2000
BENCH = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Workload:
    """Chunks, text of the corpus that stands in no prompt, and the prompts' token ids."""

    loaded: LoadedModel
    texts: list[str]
    corpus: str

    @classmethod
    def of(cls, loaded: LoadedModel, chunks: int, chunk_tokens: int, corpus_tokens: int) -> Workload:
        texts = cut_chunks(loaded.tokenizer, chunks, chunk_tokens)
        ids = loaded.tokenizer.encode(real_text(), special=False)[chunks * chunk_tokens :][:corpus_tokens]
        return cls(loaded, texts, loaded.tokenizer.decode(ids).strip())

    def layout(self, order: list[int], question: str) -> Any:
        """The prompt of these chunks in this order."""
        documents = [PromptDocument(text=self.texts[index]) for index in order]
        return build_prompt(
            self.loaded.tokenizer, self.loaded.template, DEFAULT_SYSTEM, [("user", question)], documents
        )

    def ids(self, order: list[int]) -> list[int]:
        """The token ids that the peers get."""
        return list(self.layout(order, QUESTIONS[0]).token_ids)


def make_orders(rng: random.Random, chunks: int, count: int) -> list[list[int]]:
    """Random orders; as many as there are chunks begin with different ones, so that no prefix cache helps."""
    firsts = rng.sample(range(chunks), chunks)
    orders = []
    for index in range(count):
        first = firsts[index % chunks]
        others = [chunk for chunk in range(chunks) if chunk != first]
        orders.append([first, *rng.sample(others, len(others))])
    return orders


class Bench:
    """All engines, and what was measured of them."""

    def __init__(
        self, args: argparse.Namespace, work: Workload, own: EngineProcess, peers: list[EngineProcess]
    ) -> None:
        self._args, self._work, self._own, self._peers = args, work, own, peers
        self.ttft: dict[str, list[float]] = {name: [] for name in (*MODES, *[peer.name for peer in peers])}
        self.rate: dict[str, float] = {}

    def first_tokens(self, orders: list[list[int]]) -> None:
        """One round per order; the first warms up and does not count."""
        for turn, order in enumerate(orders):
            self._own.ask({"prepare": order, "question": QUESTIONS[0]})
            calls = [(name, self._own_call(name, [order], 1)) for name in MODES]
            calls += [(peer.name, self._peer_call(peer, [order], 1)) for peer in self._peers]
            # who comes first changes from round to round
            for name, call in calls[turn % len(calls) :] + calls[: turn % len(calls)]:
                seconds = call()
                if turn:
                    self.ttft[name].append(1e3 * seconds)
                print(f"round {turn} of {len(orders) - 1}: {name} {1e3 * seconds:.0f} ms", file=sys.stderr, flush=True)

    def rates(self, orders: list[list[int]]) -> None:
        """Requests per second with all of `orders` asked at once."""
        for order in orders:
            self._own.ask({"prepare": order, "question": QUESTIONS[0]})
        tokens = self._args.output_tokens
        calls = [(name, self._own_call(name, orders, tokens)) for name in MODES]
        calls += [(peer.name, self._peer_call(peer, orders, tokens)) for peer in self._peers]
        for name, call in calls:
            self.rate[name] = len(orders) / call()
            print(f"{name}: {self.rate[name]:.3f} requests/s", file=sys.stderr, flush=True)

    def _own_call(self, mode: str, orders: list[list[int]], tokens: int) -> Any:
        asked = {"mode": mode, "orders": orders, "question": QUESTIONS[0], "tokens": tokens}
        return lambda: self._own.ask(asked)["seconds"]

    def _peer_call(self, peer: EngineProcess, orders: list[list[int]], tokens: int) -> Any:
        prompts = [self._work.ids(order) for order in orders]
        return lambda: peer.ask({"prompts": prompts, "tokens": tokens})["seconds"]


def start_engines(
    args: argparse.Namespace, work: Workload, path: Path, folder: Path, stack: contextlib.ExitStack
) -> Any:
    """kvblend's process and the peers', all ready."""
    job = {"path": str(path), "model": args.model, "texts": work.texts, "corpus": work.corpus,
           "num_tokens": len(work.ids(list(range(len(work.texts)))))}  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    found, missing = find_peers(args.peer, ROOT / ".peers", args.only)
    for line in missing:
        print(line, file=sys.stderr, flush=True)
    threads = ["--threads", str(args.threads)]
    hf = folder / "hf"
    if {"transformers", "vllm"} & set(found):
        Reference(work.loaded).save(hf)
    peers = []
    for name, python in found.items():
        command = [python, str(BENCH / "peer_runner.py"), name, "--gguf", str(path), "--hf", str(hf), *threads]
        peers.append(EngineProcess(name, command))
    own = EngineProcess("kvblend", [sys.executable, str(BENCH / "peer_own.py"), str(folder / "job.json"), *threads])
    engines = []
    for engine in (own, *peers):
        stack.callback(engine.close)
        facts = engine.start()
        if facts is None:
            continue
        print(f"{engine.name} {facts['version']}: {facts['settings']}", file=sys.stderr, flush=True)
        engines.append(engine)
    if own not in engines:
        raise SystemExit(f"kvblend did not start: {own.last_words()}")
    return own, engines[1:]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    name, path = resolve_model(args.model)
    args.model = name
    torch.set_num_threads(args.threads)
    loaded = load_model(path, torch.float32, torch.device("cpu"))
    work = Workload.of(loaded, args.chunks, args.chunk_tokens, 300 if args.quick else CORPUS_TOKENS)
    rng = random.Random(args.seed)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        own, peers = start_engines(args, work, path, Path(folder), stack)
        bench = Bench(args, work, own, peers)
        orders = make_orders(rng, args.chunks, args.rounds + 1 + args.requests)
        bench.first_tokens(orders[: args.rounds + 1])
        if args.requests:
            bench.rates(orders[args.rounds + 1 :])
        facts = {engine.name: engine.facts for engine in (own, *peers)}
    tokens = len(work.ids(list(range(args.chunks))))
    rows = [own_row(mode, tokens, bench.ttft[mode], bench.rate.get(mode)) for mode in MODES]
    rows += [peer_row(peer.name, tokens, bench.ttft[peer.name], bench.rate.get(peer.name)) for peer in peers]
    orders = make_orders(rng, args.chunks, args.kl_prompts)
    layouts = [work.layout(order, QUESTIONS[i % len(QUESTIONS)]) for i, order in enumerate(orders)]
    kl = mean_kl(work.loaded, work.corpus, layouts) if layouts else {}
    return {
        "machine": describe_machine(),
        "model": name,
        "context_tokens": args.chunks * args.chunk_tokens,
        "rounds": args.rounds,
        "kl_prompts": args.kl_prompts,
        "engines": ["kvblend", *[peer.name for peer in peers]],
        "settings": facts,
        "rows": rows,
        "ratio": ratios({name: statistics.median(times) for name, times in bench.ttft.items()}, bench.rate),
        "kl": kl,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds after one that warms up")
    parser.add_argument("--requests", type=int, default=3, help="requests at once for the rates; 0 leaves them out")
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens per answer for the rates")
    parser.add_argument("--kl-prompts", type=int, default=4, help="prompts that KL is averaged over; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every engine (all cores)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer's own Python")
    parser.add_argument(
        "--only", default=None, help="peers to run, joined by commas; empty for none (all that are there)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one round over 2 chunks of 320 tokens")
    parser.add_argument("--png", type=Path, help="where to draw the figures")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.quick:
        args.chunks, args.chunk_tokens, args.rounds, args.requests, args.kl_prompts = 2, 320, 1, 1, 1
    result = run(args)
    if args.png:
        from peer_plot import plot

        plot(result["rows"], args.png)
    if args.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        rate = "" if row["requests_per_s"] is None else f"{row['requests_per_s']:8.3f} requests/s"
        print(f"{row['engine']:13} {row['mode']:16} {row['tokens']:6} tokens {row['ttft_ms_median']:9.0f} ms {rate}")
    print(f"ratios: {result['ratio']}\nKL: {result['kl']}")


if __name__ == "__main__":
    main()
