"""The load test from its options to its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.figures import compute, percentile_name
from loadtest.fleet import FleetError, run_fleet
from loadtest.jobs import BadData, Job
from loadtest.options import Options, read_options
from loadtest.outcome import Outcome
from loadtest.report import block, describe, result_path, save, table, warnings
from loadtest.server import ServerAbsent, find_model
from loadtest.workload import make_workload

OK, FAILED, UNUSABLE, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test; 0 when every request was answered, 1 when some failed, 2 where nothing could be sent."""
    options = read_options(arguments)
    try:
        # all data are read and the plot's library is there before anything is sent
        workloads = [make_workload(options, run, rate) for run, rate in enumerate(options.request_rate)]
        if options.plot is not None:
            import matplotlib as _  # noqa: F401
        model = find_model(options)
        results = []
        failed = 0
        for run, (rate, workload) in enumerate(zip(options.request_rate, workloads, strict=True)):
            if workload.warmups:
                before = send(options, model, workload.pool, workload.warmups, float("inf"), "warming up")
                failed += report_warmups(before)
            outcomes = send(options, model, workload.pool, workload.jobs, rate, f"{rate:g} requests/s")
            result = finish(options, model, rate, outcomes)
            results.append(result)
            failed += result["failed"]
            if run + 1 < len(options.request_rate):
                print(flush=True)
    except (BadData, ServerAbsent, FleetError, ModuleNotFoundError) as error:
        print(f"load_test.py: error: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("load_test.py: stopped", file=sys.stderr)
        return STOPPED
    if len(results) > 1:
        print("\n".join(["", *table(results)]))
    if options.plot is not None:
        draw(options, results, options.plot)
    return FAILED if failed else OK


def send(
    options: Options, model: str, pool: tuple[str, ...], jobs: tuple[Job, ...], rate: float, title: str
) -> list[Outcome]:
    """Send jobs at a rate, with a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=options.disable_tqdm, transient=True)
    failed = 0
    with bar:
        task = bar.add_task(title, total=len(jobs), failed=0)

        def on_status(status: str) -> None:
            nonlocal failed
            failed += status == "failed"
            bar.update(task, advance=1, failed=failed)

        return run_fleet(options, model, pool, jobs, rate, on_status)


def report_warmups(outcomes: Sequence[Outcome]) -> int:
    """Say which warm-up requests failed; how many did."""
    errors = [outcome.error for outcome in outcomes if outcome.status == "failed"]
    if errors:
        print(f"load_test.py: {len(errors)} warm-up requests failed: {errors[0]}", file=sys.stderr)
    return len(errors)


def finish(options: Options, model: str, rate: float, outcomes: list[Outcome]) -> dict[str, Any]:
    """Print and save one rate's result; the result."""
    now = datetime.now()
    result = {**describe(options, model, rate, now), **compute(outcomes, options, rate)}
    print("\n".join(block(result, options)), flush=True)
    for warning in warnings(outcomes, result):
        print(f"load_test.py: {warning}", file=sys.stderr)
    if options.save_result or options.save_detailed:
        path = result_path(options, model, rate, now)
        save(path, result, outcomes, detailed=options.save_detailed)
        print(f"Saved {path}")
    return result


def draw(options: Options, results: Sequence[dict[str, Any]], path: Path) -> None:
    """Save the picture."""
    from loadtest.plot import plot

    plot(results, percentile_name(max(options.metric_percentiles)), path)
    print(f"Saved {path}")
