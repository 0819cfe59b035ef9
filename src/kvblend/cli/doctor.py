"""`kvblend doctor`: the gate of a model, run afresh, and what it ran on."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvblend import __version__
from kvblend.cli.models import resolve_model

if TYPE_CHECKING:
    from kvblend.actors.precision import StoreForm
    from kvblend.actors.settings import Settings
    from kvblend.engine.assembly import Engine
    from kvblend.engine.evaluation.gate_report import GateReport

_TABLE_WIDTH = 110


def diagnose(settings: Settings, *, as_json: bool) -> int:
    """Judge the model at these settings and print what was found; the exit code: 0 where it may be served blended."""
    from kvblend.engine.assembly import assemble_engine

    name, path = resolve_model(settings.model)
    with _progress(f"judging {name}", shown=not as_json):
        engine = assemble_engine(
            path, settings.dtype, settings.device, settings.attention, settings.kv_tokens_max, settings.threads
        )
        form = judge_form(settings, engine)
        engine = engine.storing(form.dtype)
        report = examine(settings, engine)
    surroundings = describe_surroundings(settings, engine, form)
    if as_json:
        fields = {"model": name, "passed": report.passed, "checks": report.to_fields(), "environment": surroundings}
        typer.echo(json.dumps(fields))
    else:
        _print(name, report, surroundings)
    return 0 if report.passed else 1


def examine(settings: Settings, engine: Engine) -> GateReport:
    """The gate of a loaded model; one that cannot be asked the probes fails."""
    from kvblend.actors.gate import begin_checks, refusal
    from kvblend.engine.evaluation.gate import GateUnfit
    from kvblend.engine.evaluation.gate_report import GateReport

    try:
        return GateReport(tuple(check for check in begin_checks(settings, engine) if check is not None))
    except GateUnfit as error:
        return refusal("probes", str(error))


def judge_form(settings: Settings, engine: Engine) -> StoreForm:
    """The dtype that a server with these settings stores chunks in, judged afresh where it decides itself."""
    from kvblend.actors.precision import AUTO_DTYPE, StoreForm, begin_store_check, form_of, settled_form
    from kvblend.engine.evaluation.gate import GateUnfit

    settled = settled_form(settings, engine)
    if settled is not None:
        return settled
    try:
        (check,) = (found for found in begin_store_check(engine) if found is not None)
    except GateUnfit as error:
        return StoreForm(engine.dtype, f"the probes that judge {AUTO_DTYPE} cannot be asked: {error}")
    return form_of(engine, check)


def describe_surroundings(settings: Settings, engine: Engine, form: StoreForm) -> dict[str, str]:
    """What the checks ran on, and the setting they judged."""
    from kvblend.engine.assembly import count_threads

    return {
        "kvblend": __version__,
        "torch": importlib.metadata.version("torch"),
        "device": settings.device,
        "dtype": engine.dtype,
        "store_dtype": f"{form.dtype} ({settings.store_dtype}: {form.reason})",
        "threads": str(count_threads()),
        "attention": engine.attention,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "conditioning": settings.conditioning,
        "selector": settings.selector,
        "recompute_ratio": str(settings.recompute_ratio),
        "fingerprint": engine.fingerprint,
    }


@contextmanager
def _progress(text: str, *, shown: bool) -> Iterator[None]:
    """A spinner on stderr while the body runs."""
    columns = (SpinnerColumn(), TextColumn(text), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        progress.add_task(text, total=None)
        yield


def _print(name: str, report: GateReport, surroundings: dict[str, str]) -> None:
    checks = Table("check", "result", "what was compared", title=f"Gate of {name}")
    for check in report.checks:
        result = "[green]passed[/green]" if check.passed else "[red]failed[/red]"
        checks.add_row(check.name, result, check.reason)
    around = Table("environment", "", show_header=False)
    for key, value in surroundings.items():
        around.add_row(key, value)
    console = Console()
    console = Console(width=max(console.width, _TABLE_WIDTH))
    console.print(checks)
    console.print(around)
    verdict = "may be served blended" if report.passed else "is served by full prefill, unless force_blend is set"
    console.print(f"{name} {verdict}.")
