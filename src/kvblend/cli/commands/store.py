"""`kvblend store`: its commands and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvblend.cli.failures import BadInput
from kvblend.cli.options import StoreOption
from kvblend.cli.reporting import reported

store = typer.Typer(no_args_is_help=True, help="Look after a folder of stored chunks; no model is loaded.")

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Chunks of this salt, or tag as `list` shows it.")]
FingerprintOption = Annotated[str | None, typer.Option("--fingerprint", help="Chunks of this model only.")]
IdOption = Annotated[list[str] | None, typer.Option("--id", help="This chunk; repeatable.")]


@store.command()
@reported
def stats(folder: StoreOption = None, as_json: JsonOption = False) -> None:
    """Count chunks, tokens and bytes by model and tenant; a server may be running."""
    from kvblend.cli.store_work import show_stats

    show_stats(folder, as_json=as_json)


@store.command("list")
@reported
def list_chunks(
    folder: StoreOption = None,
    tenant: TenantOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """List chunks, the longest stored first; a server may be running."""
    from kvblend.cli.store_work import select, show_list

    show_list(folder, select(None, tenant, fingerprint), as_json=as_json)


@store.command()
@reported
def check(
    folder: StoreOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Set damaged files aside, sweep, index anew.")] = False,
    remove_old: Annotated[bool, typer.Option("--remove-old", help="Remove what `stats` shows as old.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify every chunk file, all bytes of it; exit code 1 where damage was found and not repaired."""
    from kvblend.cli.store_work import show_check

    raise typer.Exit(show_check(folder, repair=repair, as_json=as_json, remove_old=remove_old))


@store.command()
@reported
def evict(
    folder: StoreOption = None,
    to_bytes: Annotated[int | None, typer.Option(help="Only until the chunk files have so many bytes.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Stored longer ago than e.g. 90s, 30m, 12h or 7d.")] = None,
    tenant: TenantOption = None,
    fingerprint: FingerprintOption = None,
    chunk_id: IdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the chunks that fit all flags given, the longest stored first."""
    from kvblend.cli.store_work import evict_chunks, select

    if to_bytes is not None and to_bytes < 0:
        raise BadInput(f"--to-bytes is {to_bytes}; it must be at least 0")
    if to_bytes is None and not any((older_than, tenant is not None, fingerprint, chunk_id)):
        raise BadInput("say which chunks: --to-bytes, --older-than, --tenant, --fingerprint or --id")
    evict_chunks(folder, select(chunk_id, tenant, fingerprint, older_than), to_bytes, as_json=as_json)


@store.command()
@reported
def clear(
    folder: StoreOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove every chunk and every damaged file; the folder stays a store."""
    from kvblend.cli.store_work import clear_store

    clear_store(folder, sure=yes, as_json=as_json)


@store.command("export")
@reported
def export_chunks(
    archive: Annotated[Path, typer.Argument(help="The tar file to make.")],
    folder: StoreOption = None,
    tenant: TenantOption = None,
    fingerprint: FingerprintOption = None,
    chunk_id: IdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write chunks to a tar file, each verified; exit code 1 where damaged ones were left out."""
    from kvblend.cli.store_work import export_store, select

    raise typer.Exit(export_store(folder, archive, select(chunk_id, tenant, fingerprint), as_json=as_json))


@store.command("import")
@reported
def import_chunks(
    archive: Annotated[Path, typer.Argument(help="A tar file of `kvblend store export`.")],
    folder: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take in chunks from a tar file, each verified; exit code 1 where members were refused."""
    from kvblend.cli.store_work import import_store

    raise typer.Exit(import_store(folder, archive, as_json=as_json))
