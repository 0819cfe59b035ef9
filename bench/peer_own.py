#!/usr/bin/env python3
"""kvblend in a process of its own, asked over stdin by `bench/peers.py` as every peer is.

Two systems stand in it, because chunks are computed behind different texts: `system` with the default conditioning,
`warm` with the best one (text like the corpus, echoes). Time runs from submit to the end of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import uvloop
from peer_runner import answer, private_stdout

from kvblend.actors.messages import BlendOptions, ChatMessage, Document, Finished, Generate, Mode, Sampling
from kvblend.actors.settings import Settings
from kvblend.actors.system import System
from kvblend.engine.recommended import recommended

# what `auto` chooses for a float32 model whose check passes
STORE_DTYPE: Literal["bfloat16"] = "bfloat16"


@dataclass(frozen=True, slots=True)
class OwnMode:
    """A way of answering: by which system, and how. `ratio` None where nothing is chosen."""

    system: str
    mode: Mode
    selector: str = "none"
    ratio: float | None = None


MODES: dict[str, OwnMode] = {
    "full": OwnMode("system", "full"),
    "divergence@0.15": OwnMode("system", "blend", "divergence", 0.15),
    "query@0.05": OwnMode("warm", "blend", recommended(0.05).spec.selector, 0.05),
    "question_only": OwnMode("warm", "reuse"),
}


def own_settings(name: str, store: Path, corpus: str, threads: int) -> Settings:
    """The settings of one of the two systems; the gate is left out, it measures nothing here."""
    if name == "system":
        return Settings(store=store, gate="off", threads=threads, store_dtype=STORE_DTYPE)
    spec = recommended(0.05).spec
    return Settings(
        store=store, gate="off", threads=threads, store_dtype=STORE_DTYPE,
        conditioning="warm", warm_text=corpus, echo=True,
        selector=spec.selector, score_layers=spec.score_layers, probes=spec.probes,
        residual=spec.residual, residual_fraction=spec.residual_fraction,
    )  # fmt: skip


class Own:
    """Both systems, and the workload's chunks in them."""

    def __init__(self, systems: dict[str, System], texts: list[str], num_tokens: int) -> None:
        self._systems, self._texts, self._num_tokens = systems, texts, num_tokens
        self._count = 0

    async def store(self) -> None:
        """Compute and store every chunk, in both ways."""
        documents = tuple(Document(text) for text in self._texts)
        for system in self._systems.values():
            await self._finished(system, Generate("store", (), documents, generate=False))

    async def prepare(self, order: list[int], question: str) -> None:
        """Let the chunk that comes first be computed and stored as it is in that place, in both systems."""
        for name, mode in {mode.system: name for name, mode in MODES.items()}.items():
            await self._ask(mode, order, question, 1, check=False, system=name)

    async def run(self, mode: str, orders: list[list[int]], question: str, tokens: int) -> float:
        """Seconds that all these prompts take, asked at once."""
        began = time.perf_counter()
        await asyncio.gather(*[self._ask(mode, order, question, tokens) for order in orders])
        elapsed = time.perf_counter() - began
        for system in self._systems.values():
            await system.settle()
        return elapsed

    async def _ask(
        self, mode: str, order: list[int], question: str, tokens: int, check: bool = True, system: str = ""
    ) -> None:
        self._count += 1
        how = MODES[mode]
        request = Generate(
            f"peers-{self._count}",
            (ChatMessage("user", question),),
            tuple(Document(self._texts[index]) for index in order),
            sampling=Sampling(max_tokens=tokens, ignore_eos=True),
            blend=BlendOptions(mode=how.mode, recompute_ratio=how.ratio),
        )
        usage = (await self._finished(self._systems[system or how.system], request)).usage
        if usage.prompt_tokens != self._num_tokens:
            raise RuntimeError(f"the prompt has {usage.prompt_tokens} tokens here and {self._num_tokens} in the peers")
        if check and how.mode != "full" and usage.chunk_hits != len(order):
            raise RuntimeError(f"{usage.chunk_hits} of {len(order)} chunks hit; the figures would be wrong")

    @staticmethod
    async def _finished(system: System, request: Generate) -> Finished:
        stream = await system.submit(request)
        _, finished = await stream.result()
        return finished


async def serve(job: dict[str, Any], threads: int) -> None:
    """Start, store the chunks, and answer the lines of stdin."""
    out = private_stdout()
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, System] = {}
        for name in dict.fromkeys(mode.system for mode in MODES.values()):
            settings = own_settings(name, Path(folder) / name, job["corpus"], threads)
            systems[name] = await System.start(settings, Path(job["path"]), job["model"])
        try:
            own = Own(systems, job["texts"], job["num_tokens"])
            await own.store()
            shown = {name: f"{how.mode} {how.selector}, chunks computed behind: {how.system}"
                     for name, how in MODES.items()}  # fmt: skip
            print(json.dumps({"ready": True, "version": "", "settings": shown}), file=out, flush=True)
            loop = asyncio.get_running_loop()

            def handle(given: dict[str, Any]) -> dict[str, Any]:
                return asyncio.run_coroutine_threadsafe(_handle(own, given), loop).result()

            await asyncio.to_thread(answer, sys.stdin, out, handle)
        finally:
            for system in systems.values():
                await system.close()


async def _handle(own: Own, given: dict[str, Any]) -> dict[str, Any]:
    if "prepare" in given:
        await own.prepare(given["prepare"], given["question"])
        return {"seconds": 0.0}
    seconds = await own.run(given["mode"], given["orders"], given["question"], given["tokens"])
    return {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="JSON file: path, model, texts, corpus, num_tokens")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    uvloop.run(serve(json.loads(args.job.read_text(encoding="utf-8")), args.threads))


if __name__ == "__main__":
    main()
