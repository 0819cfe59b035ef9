"""`kvblend config`: what is set, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvblend.cli.flags import Flags, with_settings
from kvblend.cli.options import SETTING_OPTIONS
from kvblend.cli.reporting import reported

config = typer.Typer(no_args_is_help=True, help="Show or check settings.")


@config.command()
@reported
@with_settings(*SETTING_OPTIONS)
def show(
    given: Flags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print every setting's value and where it comes from; takes the flags of serve."""
    from kvblend.cli.config.show import show_configuration

    show_configuration(given.resolve(), as_json=as_json)


@config.command()
@reported
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .toml, .yaml or .yml file.")],
    lmcache: Annotated[bool, typer.Option("--lmcache", help="It has the names of LMCache.")] = False,
) -> None:
    """Check a configuration file; exit code 2 and a line for each thing that is wrong with it."""
    from kvblend.cli.config.show import show_check

    show_check(file, lmcache=lmcache)
