"""`kvblend config show` and `check`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvblend.cli.config.fields import Field, known_fields
from kvblend.cli.config.layers import Configuration, check_file

HIDDEN = "(set, not shown)"
_VALUE_CHARS = 60


def show_configuration(found: Configuration, *, as_json: bool) -> None:
    """Print all settings, each with its source; the values of secrets are not shown."""
    rows = [(known, shown_value(known, value_of(found, known)), origin_of(found, known)) for known in _all()]
    if as_json:
        fields = {known.name: {"value": value, "source": origin} for known, value, origin in rows}
        typer.echo(json.dumps({"settings": fields, "notes": list(found.notes)}, ensure_ascii=False))
        return
    table = Table("setting", "value", "from", box=None, padding=(0, 2, 0, 0))
    for known, value, origin in rows:
        text = value if isinstance(value, str) else json.dumps(value)
        text = text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 3] + "..."
        # as text: brackets in a value are no markup
        table.add_row(known.name, Text(text), Text(origin))
    console = Console()
    Console(width=max(console.width, 120)).print(table)


def show_check(file: Path, *, lmcache: bool) -> None:
    """Say that a file is sound, and what is set aside in it. BadInput where it is not."""
    found = check_file(file, lmcache=lmcache)
    for note in found.notes:
        typer.echo(f"note: {note}")
    names = ", ".join(sorted(found.given)) or "nothing"
    typer.echo(f"{file} is sound and sets {names}")


def shown_value(known: Field, value: Any) -> Any:
    """The value as plain data for JSON, secrets and passwords in addresses hidden."""
    if known.secret:
        return HIDDEN if value else value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [shown_value(known, item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\w+://)\S*@", r"\1***@", value)
    return value


def value_of(found: Configuration, known: Field) -> Any:
    """The value in force."""
    owners = {type(part): part for part in (found.settings, found.server, found.limits)}
    return getattr(owners[known.owner], known.name)


def origin_of(found: Configuration, known: Field) -> str:
    """Where the value came from."""
    given = found.given.get(known.name)
    return "default" if given is None else given.origin()


def _all() -> list[Field]:
    return list(known_fields().values())
