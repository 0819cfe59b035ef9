"""The load of `bench/throughput.py`: prompts out of a pool of chunks, clients that send them, what each one saw."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvblend.actors.messages import (
    BlendOptions,
    ChatMessage,
    Delta,
    Document,
    Finished,
    Generate,
    Mode,
    Sampling,
    Usage,
)
from kvblend.actors.messages import SelectionOptions as Selection
from kvblend.actors.system import System

QUESTION = "Describe in detail what these passages say, one after another, beginning with the first."
RATIO = 0.15


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: seconds from submit to the first text and to the end, and the gaps between its pieces of text.

    An answer without any text has the first token's time, as the engine tells it.
    """

    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]
    usage: Usage

    @property
    def decode_s(self) -> float:
        """Seconds from the first text to the end."""
        return self.total_s - self.ttft_s


@dataclass(slots=True)
class Pool:
    """Chunks to ask about. Each prompt has `per_request` of them, shuffled; no order comes twice.

    `weights` make some more likely than others; None: all alike.
    """

    texts: Sequence[str]
    per_request: int
    chance: random.Random
    weights: Sequence[float] | None = None
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def draw(self) -> tuple[int, ...]:
        """Numbers of chunks in an order that was not drawn before. Raises ValueError where all were."""
        for _ in range(10_000):
            if self.weights is None:
                order = tuple(self.chance.sample(range(len(self.texts)), self.per_request))
            else:
                # the largest of u ** (1 / weight) are a weighted sample without repeats
                marks = [self.chance.random() ** (1.0 / weight) for weight in self.weights]
                order = tuple(sorted(range(len(marks)), key=marks.__getitem__)[-self.per_request :])
                order = tuple(self.chance.sample(order, len(order)))
            if order not in self.seen:
                self.seen.add(order)
                return order
        raise ValueError(f"{len(self.texts)} chunks give no new order of {self.per_request}")


def zipf_weights(count: int, exponent: float = 1.0) -> list[float]:
    """The share of the n-th of `count` things falls like 1 / n ** exponent."""
    return [1.0 / (rank + 1) ** exponent for rank in range(count)]


class Clients:
    """Sends requests of one mode to a system and keeps what came back. Every answer has `max_tokens` tokens."""

    def __init__(self, system: System, pool: Pool, max_tokens: int, ratio: float = RATIO) -> None:
        self.system = system
        self.pool = pool
        self.max_tokens = max_tokens
        self.ratio = ratio
        self._count = 0

    def request(self, mode: Mode, order: Sequence[int] | None = None) -> Generate:
        """A question over chunks in a new order."""
        self._count += 1
        chosen = self.pool.draw() if order is None else order
        blend = (
            BlendOptions(mode, self.ratio, Selection(selector="divergence")) if mode == "blend" else BlendOptions(mode)
        )
        documents = tuple(Document(self.pool.texts[index]) for index in chosen)
        sampling = Sampling(max_tokens=self.max_tokens, ignore_eos=True)
        return Generate(f"t{self._count}", (ChatMessage("user", QUESTION),), documents, sampling=sampling, blend=blend)

    async def ask(self, mode: Mode, order: Sequence[int] | None = None) -> Answer:
        """Send one request and read it to its end. RuntimeError where it did not finish as it should."""
        request = self.request(mode, order)
        began = time.perf_counter()
        stream = await self.system.submit(request)
        marks: list[float] = []
        async for event in stream:
            if isinstance(event, Delta):
                marks.append(time.perf_counter() - began)
        total, end = time.perf_counter() - began, stream.terminal
        if not isinstance(end, Finished):
            raise RuntimeError(f"a {mode} request ended with {end}")
        if end.usage.output_tokens != self.max_tokens:
            raise RuntimeError(f"a {mode} request gave {end.usage.output_tokens} tokens in place of {self.max_tokens}")
        gaps = tuple(after - before for before, after in itertools.pairwise(marks))
        return Answer(marks[0] if marks else end.usage.ttft_ms / 1e3, total, gaps, end.usage)

    async def store(self) -> None:
        """Store every chunk of the pool, and wait until it is durable."""
        documents = tuple(Document(text) for text in self.pool.texts)
        await (await self.system.submit(Generate("store", (), documents, generate=False))).result()
        await self.system.settle()


@dataclass(slots=True)
class Measured:
    """One row: what a number of requests of one mode saw under one load. `rate` is that of arrivals, None: closed.

    `cpu_s` are processor seconds of the process: on a machine with other work they say what the clock cannot.
    `arrivals_s` are an open loop's, from its start.
    """

    mode: str
    loop: str
    rate: float | None
    clients: int | None
    answers: list[Answer] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        """Answers per second of the whole time, the first and last ones' included."""
        return len(self.answers) / self.seconds if self.seconds else 0.0

    def row(self) -> dict[str, Any]:
        """The figures as `--json` prints them."""
        first = [1e3 * answer.ttft_s for answer in self.answers]
        gaps = [1e3 * gap for answer in self.answers for gap in answer.gaps_s]
        return {
            "mode": self.mode,
            "loop": self.loop,
            "rate": self.rate,
            "clients": self.clients,
            "requests_per_s": self.requests_per_s,
            "ttft_p50_ms": percentile(first, 50),
            "ttft_p99_ms": percentile(first, 99),
            "itl_p99_ms": percentile(gaps, 99) if gaps else None,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` per cent do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share / 100 * len(values)) - 1)]


async def closed_loop(clients: Clients, mode: Mode, at_once: int, count: int, name: str = "") -> Measured:
    """`count` requests, of which `at_once` are always under way: who has an answer asks the next question."""
    out = Measured(name or mode, "closed", None, at_once)
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            out.answers.append(await clients.ask(mode))
            out.ends_s.append(time.perf_counter() - began)

    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, count)):
            group.create_task(client())
    out.seconds, out.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return out


async def open_loop(clients: Clients, mode: Mode, rate: float, count: int, chance: random.Random) -> Measured:
    """`count` requests at Poisson's times, `rate` per second; nobody waits for anybody's answer."""
    out = Measured(mode, "open", rate, None)

    async def client(after_s: float) -> None:
        await asyncio.sleep(max(0.0, began + after_s - time.perf_counter()))
        out.answers.append(await clients.ask(mode))
        out.ends_s.append(time.perf_counter() - began)

    due, began, cpu = 0.0, time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(client(due))
            out.arrivals_s.append(due)
            due += chance.expovariate(rate)
    out.seconds, out.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return out


def medians(answers: Sequence[Answer]) -> tuple[float, float]:
    """Median seconds to the first token, and from there to the end."""
    first = statistics.median(answer.ttft_s for answer in answers)
    return first, statistics.median(answer.decode_s for answer in answers)
