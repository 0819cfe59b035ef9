"""`kvblend doctor`: its flags."""

from __future__ import annotations

from typing import Annotated

import typer

from kvblend.cli.flags import Flags, with_settings
from kvblend.cli.reporting import reported


@reported
@with_settings(
    "model",
    "dtype",
    "store_dtype",
    "threads",
    "device",
    "attention",
    "conditioning",
    "recompute_ratio",
    "selector",
    "residual",
    "blend",
    "gate_kl_max",
)
def doctor(
    given: Flags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge whether a model may be served blended; exit code 1 where it may not."""
    settings = given.resolve().settings
    from kvblend.cli.doctor import diagnose

    raise typer.Exit(diagnose(settings, as_json=as_json))
