"""What arrives: requests over a Zipf pool of chunks, at Poisson's times or in bursts. The same for every policy."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvblend.actors.core.conditioning import Conditioning
from kvblend.actors.core.events import Job, SegmentKeys
from kvblend.actors.core.planning import segment_keys
from kvblend.actors.messages import BlendOptions, Mode, Sampling
from kvblend.engine.layout import PromptLayout, SegmentKind

SYSTEM = tuple(range(1, 31))
NAME_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` at `rate` per second. Of a `burst_share` of the time the rate is `burst` times that of the rest.

    Chunks are drawn from `pool` ones, the n-th with weight 1 / n ** `zipf`. A `deadline_share` of the requests has a
    deadline, drawn evenly from `deadline_s`. `clients` ask in turn at random. `arrivals_s`, where given, are when they
    come, in place of times at this rate.
    """

    requests: int = 100_000
    rate: float = 0.4
    mode: Mode = "blend"
    ratio: float = 0.15
    pool: int = 400
    zipf: float = 1.0
    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 40
    max_tokens: int = 16
    burst: float = 4.0
    burst_share: float = 0.1
    burst_s: float = 60.0
    deadline_share: float = 0.0
    deadline_s: tuple[float, float] = (10.0, 60.0)
    clients: int = 8
    seed: int = 0
    arrivals_s: tuple[float, ...] = ()

    def arrivals(self) -> Iterator[float]:
        """Seconds of arrival, ascending: exponential gaps whose rate switches between calm and burst."""
        if self.arrivals_s:
            yield from self.arrivals_s
            return
        chance = random.Random(f"{self.seed}/arrivals")
        calm = self.rate / (1.0 + self.burst_share * (self.burst - 1.0))
        spans = {True: self.burst_s, False: self.burst_s * (1.0 - self.burst_share) / max(1e-9, self.burst_share)}
        steady = self.burst == 1.0 or self.burst_share <= 0.0
        now, bursting = 0.0, False
        until = float("inf") if steady else chance.expovariate(1.0 / spans[False])
        for _ in range(self.requests):
            while True:
                gap = chance.expovariate(calm * (self.burst if bursting else 1.0))
                if now + gap <= until:
                    now += gap
                    break
                # exponential gaps have no memory: go on from the switch at the other rate
                now, bursting = until, not bursting
                until = now + chance.expovariate(1.0 / spans[bursting])
            yield now

    def jobs(self) -> Iterator[Job]:
        """The requests, in order of arrival."""
        chance = random.Random(f"{self.seed}/jobs")
        chunks = [
            tuple(range(100 + n * self.chunk_tokens, 100 + (n + 1) * self.chunk_tokens)) for n in range(self.pool)
        ]
        sums = list(itertools.accumulate(1.0 / (rank + 1) ** self.zipf for rank in range(self.pool)))
        question, rules = (7,) * self.question_tokens, Conditioning()
        sampling, options = Sampling(max_tokens=self.max_tokens), BlendOptions(self.mode)
        for number in range(self.requests):
            chosen = draw(chance, sums, min(self.chunks, self.pool))
            parts = [(SegmentKind.SYSTEM, SYSTEM), *((SegmentKind.CHUNK, chunks[index]) for index in chosen)]
            layout = PromptLayout.of([*parts, (SegmentKind.QUESTION, question)])
            deadline = None
            if chance.random() < self.deadline_share:
                deadline = 1e3 * chance.uniform(*self.deadline_s)
            client = f"c{chance.randrange(max(1, self.clients))}"
            yield Job(
                f"r{number}",
                "generate",
                layout,
                short_keys(layout, self.mode, rules),
                self.mode,
                self.ratio if self.mode == "blend" else 0.0,
                options,
                sampling,
                deadline_ms=deadline,
                client=client,
            )

    def chunk_layouts(self) -> Iterator[tuple[tuple[SegmentKeys, ...], int]]:
        """Keys of a prompt for every chunk alone behind the system prompt, and the chunk's tokens."""
        for index in range(self.pool):
            ids = tuple(range(100 + index * self.chunk_tokens, 100 + (index + 1) * self.chunk_tokens))
            parts = [(SegmentKind.SYSTEM, SYSTEM), (SegmentKind.CHUNK, ids), (SegmentKind.QUESTION, (7,))]
            yield short_keys(PromptLayout.of(parts), "blend", Conditioning()), len(ids)


def short_keys(layout: PromptLayout, mode: Mode, rules: Conditioning) -> tuple[SegmentKeys, ...]:
    """The keys of a prompt whose chunks go by their first tokens: they differ there, and hashing is short."""
    parts = [
        (segment.kind, segment.token_ids[:NAME_TOKENS] if segment.kind is SegmentKind.CHUNK else segment.token_ids)
        for segment in layout.segments
    ]
    return segment_keys(PromptLayout.of(parts), mode, rules, "model", "")


def draw(chance: random.Random, sums: list[float], count: int) -> list[int]:
    """`count` different indices, by weights given as running sums."""
    chosen: list[int] = []
    while len(chosen) < count:
        index = bisect.bisect_left(sums, chance.random() * sums[-1])
        if index not in chosen:
            chosen.append(index)
    return chosen
