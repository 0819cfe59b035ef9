"""What arrives in a simulation: rates, bursts, weights, deadlines."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from simulation.workload import Workload, draw

from kvblend.engine.layout import SegmentKind


def test_poisson_arrivals_have_their_rate() -> None:
    times = list(Workload(requests=20_000, rate=5.0, burst=1.0).arrivals())
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.03)


def test_bursts_keep_the_mean_rate_and_are_denser() -> None:
    load = Workload(requests=50_000, rate=5.0, burst=6.0, burst_share=0.2, burst_s=10.0)
    times = list(load.arrivals())
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)
    per_second = Counter(int(at_s) for at_s in times)
    counts = [per_second[second] for second in range(int(times[-1]))]
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert variance > 3 * mean


def test_frequent_chunks_are_drawn_more_often_and_none_twice_in_a_prompt() -> None:
    chance, sums = random.Random(0), [1.0, 1.5, 1.8, 2.0]
    drawn = [draw(chance, sums, 2) for _ in range(2000)]
    assert all(len(set(pair)) == 2 for pair in drawn)
    counts = Counter(index for pair in drawn for index in pair)
    assert counts[0] > counts[1] > counts[2] > counts[3]


def test_a_chunk_has_one_key_of_its_own_wherever_it_stands() -> None:
    load = Workload(requests=30, pool=4, chunks=3, chunk_tokens=8, question_tokens=3)
    keys: dict[tuple[int, ...], set[object]] = {}
    for job in load.jobs():
        for place, (segment, names) in enumerate(zip(job.layout.segments, job.keys, strict=True)):
            if segment.kind is SegmentKind.CHUNK and place > 1:
                keys.setdefault(segment.token_ids, set()).add(names.precompute)
    assert [len(own) for own in keys.values()] == [1] * 4


def test_a_share_of_the_requests_has_a_deadline() -> None:
    load = Workload(requests=1000, pool=2, chunks=1, chunk_tokens=4, deadline_share=0.25, deadline_s=(2.0, 3.0))
    limits = [job.deadline_ms for job in load.jobs() if job.deadline_ms is not None]
    assert 200 < len(limits) < 300
    assert 2000 <= min(limits) <= max(limits) <= 3000
