"""`kvblend pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvblend.cli.models import KNOWN_NAMES
from kvblend.cli.options import DEFAULT_MODEL
from kvblend.cli.reporting import reported


@reported
def pull(
    model: Annotated[str, typer.Argument(help=f"A known model: {KNOWN_NAMES}.")] = DEFAULT_MODEL,
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="Agree to the model's terms unasked.")] = False,
) -> None:
    """Fetch a known model into the user's cache folder; a second pull does nothing."""
    from rich.console import Console

    from kvblend.cli.models import find_known
    from kvblend.cli.pull import ask_terms
    from kvblend.cli.pull import pull as fetch

    known, console = find_known(model), Console(stderr=True)
    ask_terms(known, accept_terms, console)
    if fetch(known, console):
        typer.echo(f"{model} ({known.licence}) is at {known.path}")
    else:
        typer.echo(f"{model} is already at {known.path}: nothing to do")
