"""Does a server get slower, or its store larger, the longer it runs? Novel orderings over a Zipf pool of chunks."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from throughput_work import Answer, Clients, Measured, Pool, closed_loop, zipf_weights

from kvblend.actors.system import System

CHUNKS_PER_REQUEST = 6
HOST_SHARE = 0.4
"""Host memory holds this share of the pool's bytes."""
Start = Callable[..., AbstractAsyncContextManager[System]]


@dataclass(frozen=True, slots=True)
class Decay:
    """Requests per second of four quarters, and what the store held after every chunk's first sight and at the end."""

    measured: Measured
    quarters: tuple[float, ...]
    cpu_quarters: tuple[float, ...]
    chunks_first: int
    chunks_end: int
    misses: int

    @property
    def decay(self) -> float:
        """1 - requests per second of the last quarter / those of the second."""
        return 1.0 - self.quarters[3] / self.quarters[1]

    def figures(self) -> dict[str, Any]:
        """Everything, for `--details`. `cpu_requests_per_s` counts processor seconds of the process, not the clock."""
        return {
            "requests": len(self.measured.answers),
            "quarters_requests_per_s": self.quarters,
            "quarters_cpu_requests_per_s": self.cpu_quarters,
            "chunks_after_first_sight": self.chunks_first,
            "chunks_at_end": self.chunks_end,
            "misses_after_first_sight": self.misses,
        }


async def measure_decay(
    start: Start, texts: Sequence[str], chunk_bytes: int, at_once: int, count: int, max_tokens: int, seed: int
) -> Decay:
    """`count` blends of six chunks, after each chunk was asked about once.

    `chunk_bytes` are those of one chunk as it is stored: the host pool is set to a part of it.
    Raises RuntimeError where the store grows after the first sight.
    """
    host = max(1 << 20, int(HOST_SHARE * len(texts) * chunk_bytes))
    # "system": a chunk that comes first is stored once, like everywhere else
    async with start(host_bytes_budget=host, conditioning="system") as system:
        pool = Pool(texts, CHUNKS_PER_REQUEST, random.Random(seed), zipf_weights(len(texts)))
        clients = Clients(system, pool, max_tokens)
        for order in first_sights(len(texts), random.Random(seed)):
            pool.seen.add(order)
            await clients.ask("blend", order)
        await system.settle()
        before = system.store_stats().chunks
        marks: list[tuple[float, float]] = [(time.perf_counter(), time.process_time())]

        def note(done: int) -> None:
            if done in quarter_ends(count):
                marks.append((time.perf_counter(), time.process_time()))
                print(f"decay: {done} of {count} requests", file=sys.stderr, flush=True)

        measured = await closed_loop(_Counting(clients, note), "blend", at_once, count, "blend/zipf")
        await system.settle()
        after = system.store_stats().chunks
    if after != before:
        raise RuntimeError(f"the store had {before} chunks when each had been seen, {after} at the end")
    misses = sum(answer.usage.chunk_misses for answer in measured.answers)
    ends = [0, *quarter_ends(count)]
    sizes = [stop - first for first, stop in itertools.pairwise(ends)]
    wall, cpu = (
        tuple(size / (b[which] - a[which]) for size, a, b in zip(sizes, marks, marks[1:], strict=False))
        for which in (0, 1)
    )
    return Decay(measured, wall, cpu, before, after, misses)


class _Counting(Clients):
    """Clients that say how many answers there were."""

    def __init__(self, clients: Clients, note: Callable[[int], None]) -> None:
        super().__init__(clients.system, clients.pool, clients.max_tokens, clients.ratio)
        self._count = 1_000_000
        self._note, self._done = note, 0

    async def ask(self, mode: Any, order: Sequence[int] | None = None) -> Answer:
        answer = await super().ask(mode, order)
        self._done += 1
        self._note(self._done)
        return answer


def quarter_ends(count: int) -> list[int]:
    """After how many of `count` answers each quarter is over."""
    return [count * quarter // 4 for quarter in (1, 2, 3, 4)]


def first_sights(count: int, chance: random.Random) -> list[tuple[int, ...]]:
    """Orders of six in which each of `count` chunks comes at least once; the last one is filled up."""
    every = chance.sample(range(count), count)
    orders = [every[first : first + CHUNKS_PER_REQUEST] for first in range(0, count, CHUNKS_PER_REQUEST)]
    missing = CHUNKS_PER_REQUEST - len(orders[-1])
    orders[-1] += [index for index in every if index not in orders[-1]][:missing]
    return [tuple(order) for order in orders]
