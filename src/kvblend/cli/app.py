"""The `kvblend` command, put together. Heavy modules are imported inside the commands: `--help` stays instant."""

from __future__ import annotations

from typing import Annotated

import typer

from kvblend import __version__
from kvblend.cli.commands.ask import ask
from kvblend.cli.commands.config import config
from kvblend.cli.commands.demo import demo
from kvblend.cli.commands.doctor import doctor
from kvblend.cli.commands.evaluate import evaluate
from kvblend.cli.commands.ingest import ingest
from kvblend.cli.commands.keys import keys
from kvblend.cli.commands.pull import pull
from kvblend.cli.commands.serve import serve
from kvblend.cli.commands.store import store

app = typer.Typer(name="kvblend", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvblend {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Answers questions over retrieved chunks from their stored KV caches, wherever the chunks stand."""


# in the order of `--help`; a command with commands of its own is added with `app.add_typer(group, name=...)`
app.command()(pull)
app.command()(serve)
app.command()(ingest)
app.command()(ask)
app.command("eval")(evaluate)
app.command()(doctor)
app.command()(demo)
app.add_typer(config, name="config")
app.add_typer(store, name="store")
app.add_typer(keys, name="keys")
