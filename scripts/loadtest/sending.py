"""Sends jobs when they are due and records what becomes of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.jobs import Job
from loadtest.options import Options
from loadtest.outcome import Outcome, Recording, Status, Transport, settle

OnEnd = Callable[[Outcome], None]


@dataclass(frozen=True)
class Plan:
    """What one process sends: `limit` requests at once at most, at the times of its jobs unless `rate` is inf."""

    options: Options
    model: str
    pool: tuple[str, ...]
    jobs: tuple[Job, ...]
    rate: float
    limit: int | None


async def send_all(plan: Plan, transport: Transport, start: float, on_end: OnEnd) -> None:
    """Send every job of the plan; `start` is the monotonic time that the jobs' own times count from."""
    if math.isinf(plan.rate) and plan.limit is not None:
        await _closed_loop(plan, plan.limit, transport, start, on_end)
    else:
        await _open_loop(plan, transport, start, on_end)


async def _open_loop(plan: Plan, transport: Transport, start: float, on_end: OnEnd) -> None:
    room = asyncio.Semaphore(plan.limit) if plan.limit is not None else None

    async def one(job: Job) -> None:
        lag = max(0.0, time.monotonic() - start - job.at_s)
        if room is None:
            on_end(await _send(plan, job, transport, start, start + job.at_s, lag))
        else:
            async with room:
                on_end(await _send(plan, job, transport, start, start + job.at_s, lag))

    async with asyncio.TaskGroup() as group:
        for job in sorted(plan.jobs, key=lambda job: job.at_s):
            # from the absolute time: an answer that is late, or a sleep that was, moves no other request
            if (ahead := start + job.at_s - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
            group.create_task(one(job))


async def _closed_loop(plan: Plan, limit: int, transport: Transport, start: float, on_end: OnEnd) -> None:
    waiting = iter(plan.jobs)

    async def lane() -> None:
        for job in waiting:
            # nobody waits before it: it is due when the one before has ended
            on_end(await _send(plan, job, transport, start, time.monotonic(), 0.0))

    if (ahead := start - time.monotonic()) > 0:
        await asyncio.sleep(ahead)
    async with asyncio.TaskGroup() as group:
        for _ in range(limit):
            group.create_task(lane())


async def _send(plan: Plan, job: Job, transport: Transport, start: float, due: float, lag: float) -> Outcome:
    recording = Recording(job)
    status: Status = "failed"
    error = ""
    try:
        status = await transport.run(job, recording)
    except TimeoutError:
        error = f"no end within {plan.options.timeout:g} s"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".removesuffix(": ")
    recording.sent = recording.sent or time.monotonic()
    return settle(recording, plan.pool, status, error, start, due, lag)
