"""Sending when due: no answer holds back a request that is due, and waits count from when it was due."""

from __future__ import annotations

import asyncio
import math
import time

from loadtest.jobs import Job
from loadtest.options import read_options
from loadtest.outcome import Outcome, Recording, Status
from loadtest.sending import Plan, send_all


class Gate:
    """Answers when `wanted` requests are open at once, and from then on at once."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.open = self.most = 0
        self.entered, self.passed = asyncio.Event(), asyncio.Event()

    async def run(self, job: Job, recording: Recording) -> Status:
        recording.sent = time.monotonic()
        self.open += 1
        self.entered.set()
        self.most = max(self.most, self.open)
        if self.open >= self.wanted:
            self.passed.set()
        await self.passed.wait()
        await asyncio.sleep(0)
        self.open -= 1
        if job.question == "fail":
            raise ValueError("no")
        return "ok"

    async def close(self) -> None:
        pass


async def sent(jobs: list[Job], gate: Gate, rate: float, limit: int | None) -> list[Outcome]:
    outcomes: list[Outcome] = []
    plan = Plan(read_options([]), "m", (), tuple(jobs), rate, limit)
    async with asyncio.timeout(20):
        await send_all(plan, gate, time.monotonic(), outcomes.append)
    return outcomes


async def test_a_request_is_sent_while_those_before_it_wait() -> None:
    jobs = [Job(index, "q", at_s=index * 0.001) for index in range(20)]
    assert len(await sent(jobs, Gate(20), 1000.0, None)) == 20


async def test_no_request_is_sent_before_it_is_due() -> None:
    jobs = [Job(index, "q", at_s=index * 0.005) for index in range(5)]
    assert all(outcome.sent_s >= outcome.due_s for outcome in await sent(jobs, Gate(1), 200.0, None))


async def test_a_wait_for_room_counts_from_when_the_request_was_due() -> None:
    gate = Gate(2)
    jobs = [Job(0, "q", at_s=0.0), Job(1, "q", at_s=0.0)]
    sending = asyncio.create_task(sent(jobs, gate, 1000.0, 1))
    await gate.entered.wait()
    gate.passed.set()
    late = (await sending)[1]
    assert late.due_s == 0.0
    assert late.sent_s > 0
    assert gate.most == 1


async def test_a_closed_loop_keeps_its_limit_full() -> None:
    gate = Gate(3)
    outcomes = await sent([Job(index, "q") for index in range(10)], gate, math.inf, 3)
    assert (len(outcomes), gate.most) == (10, 3)


async def test_a_closed_loop_s_requests_are_due_when_they_are_sent() -> None:
    outcomes = await sent([Job(index, "q") for index in range(3)], Gate(1), math.inf, 1)
    assert [outcome.due_s for outcome in outcomes] == sorted({outcome.due_s for outcome in outcomes})


async def test_a_failure_is_recorded_and_stops_nothing() -> None:
    outcomes = await sent([Job(0, "fail"), Job(1, "q")], Gate(1), math.inf, 1)
    assert [(outcome.status, outcome.error) for outcome in outcomes] == [("failed", "ValueError: no"), ("ok", "")]
