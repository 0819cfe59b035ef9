"""`kvblend keys`: API keys, each a tenant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvblend.cli.failures import BadInput
from kvblend.cli.flags import Flags, with_settings
from kvblend.cli.reporting import reported

if TYPE_CHECKING:
    from kvblend.cli.config.layers import Configuration

keys = typer.Typer(
    no_args_is_help=True, help="Make, list and remove API keys; each is a tenant with chunks of its own."
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, - and _; at most 64.")]


@keys.command()
@reported
@with_settings("keys_file")
def add(
    given: Flags,
    name: NameArgument,
    operator: Annotated[bool, typer.Option("--operator", help="This key may read /metrics, of all tenants.")] = False,
) -> None:
    """Make a key for a new tenant and print it, this once; only its hash is kept."""
    from kvblend.cli.key_file import add_key

    _, key = add_key(_path(given.resolve()), name, operator=operator)
    typer.echo(key)


@keys.command()
@reported
@with_settings("keys_file")
def rotate(given: Flags, name: NameArgument) -> None:
    """Print a new key for a tenant; the old one ends, and the tenant's chunks stay its own."""
    from kvblend.cli.key_file import rotate_key

    _, key = rotate_key(_path(given.resolve()), name)
    typer.echo(key)


@keys.command()
@reported
@with_settings("keys_file", "salt")
def remove(given: Flags, name: NameArgument) -> None:
    """Remove a tenant's key; its chunks stay in the store, where nobody can ask for them."""
    from kvblend.cli.key_file import remove_key

    found = given.resolve()
    tag = _tag(found, remove_key(_path(found), name).id)
    typer.echo(f"removed {name}; its chunks go with: kvblend store evict --tenant {tag}")


@keys.command("list")
@reported
@with_settings("keys_file", "salt")
def list_keys(
    given: Flags,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List names, with the tags that `kvblend store` shows their chunks by."""
    from kvblend.cli.key_file import read_key_file

    found = given.resolve()
    rows: list[dict[str, object]] = [
        {"name": tenant.name, "tenant": _tag(found, tenant.id), "operator": tenant.operator}
        for tenant in read_key_file(_path(found))
    ]
    if as_json:
        typer.echo(json.dumps({"keys": rows}))
        return
    for row in rows:
        typer.echo(f"{row['tenant']}  {row['name']}{'  operator' if row['operator'] else ''}")


def _path(found: Configuration) -> Path:
    if found.server.keys_file is None:
        raise BadInput("say which file: --keys-file FILE, KVBLEND_KEYS_FILE, or keys_file in a configuration file")
    return found.server.keys_file


def _tag(found: Configuration, tenant_id: str) -> str:
    from kvblend.actors.settings import tenant_salt
    from kvblend.store.keys import tenant_tag

    return tenant_tag(tenant_salt(found.settings.salt, tenant_id))
