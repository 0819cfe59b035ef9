"""Processes that send: each has its share of the jobs, and all begin at the same time."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from loadtest.jobs import Job
from loadtest.options import Options
from loadtest.outcome import Outcome, Transport
from loadtest.schedule import split_limit
from loadtest.sending import Plan, send_all

HEAD_START_S = 0.1
STOP_S_MAX = 5.0
OnStatus = Callable[[str], None]


class FleetError(Exception):
    """A process that should send ended early."""


def run_fleet(
    options: Options, model: str, pool: tuple[str, ...], jobs: tuple[Job, ...], rate: float, on_status: OnStatus
) -> list[Outcome]:
    """Send the jobs and wait for all; outcomes in the order of the jobs. `on_status` hears of each as it ends."""
    limits = split_limit(options.max_concurrency, len(jobs), options.processes)
    plans = [Plan(options, model, pool, jobs[place :: len(limits)], rate, limit) for place, limit in enumerate(limits)]
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        for plan in plans:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=work, args=(theirs, plan), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
        return sorted(_follow(processes, on_status), key=lambda outcome: outcome.index)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join(STOP_S_MAX)
            # whoever stops a load test waits for nobody: join returns at once where the process has ended
            process.kill()
            process.join()
            process.close()


def _follow(processes: dict[Connection, BaseProcess], on_status: OnStatus) -> list[Outcome]:
    for connection, process in processes.items():
        _receive(connection, process)
    start = time.monotonic() + HEAD_START_S
    for connection in processes:
        connection.send(start)
    outcomes: list[Outcome] = []
    running = dict(processes)
    while running:
        for ready in wait(list(running)):
            if not isinstance(ready, Connection):
                continue
            message = _receive(ready, running[ready])
            if isinstance(message, str):
                on_status(message)
            else:
                outcomes += message
                del running[ready]
    return outcomes


def _receive(connection: Connection, process: BaseProcess) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise FleetError(f"a sending process ended early, with exit code {process.exitcode}") from None


def make_transport(plan: Plan) -> Transport:
    """The transport that the options name."""
    if plan.options.transport == "ws":
        from loadtest.ws import WsTransport

        return WsTransport(plan.options, plan.pool, plan.model)
    from loadtest.sse import SseTransport

    return SseTransport(plan.options, plan.pool, plan.model)


def work(connection: Connection, plan: Plan) -> None:
    """The life of a process: ready, start, a status for each job, all outcomes."""
    try:
        asyncio.run(_work(connection, plan))
    except (KeyboardInterrupt, BrokenPipeError):
        # the parent was stopped and says so itself
        return


async def _work(connection: Connection, plan: Plan) -> None:
    outcomes: list[Outcome] = []

    def on_end(outcome: Outcome) -> None:
        outcomes.append(outcome)
        connection.send(outcome.status)

    transport = make_transport(plan)
    try:
        # what is loaded by now stays: collections would only look through it again
        gc.collect()
        gc.freeze()
        connection.send("ready")
        start = connection.recv()
        await send_all(plan, transport, start, on_end)
    finally:
        await transport.close()
    connection.send(outcomes)
