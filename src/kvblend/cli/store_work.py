"""What the commands of `kvblend store` do, with a progress bar, and what they print."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from kvblend.cli.failures import BadInput, CommandError
from kvblend.cli.folders import default_store_folder
from kvblend.store import maintenance
from kvblend.store.archive import ArchiveDamaged, export_chunks, import_chunks
from kvblend.store.keys import tag_of
from kvblend.store.survey import ODD_KINDS, ChunkInfo, OddFile, Progress, Selection, Survey, survey

_OLD_SHOWN_MAX = 10
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")


def select(
    ids: Sequence[str] | None, tenant: str | None, fingerprint: str | None, older_than: str | None = None
) -> Selection:
    """The chunks that flags mean. BadInput for a duration that is none."""
    before = None
    if older_than is not None:
        match = _DURATION.fullmatch(older_than)
        if match is None:
            raise BadInput(f"--older-than is {older_than!r}; give a whole number and s, m, h or d, e.g. 12h")
        before = time.time() - int(match[1]) * _UNITS_S[match[2]]
    return Selection(frozenset(ids) if ids else None, tenant, fingerprint, before)


def show_stats(folder: Path | None, *, as_json: bool) -> None:
    """Print counts by model and by tenant, and which files are old chunks that are never read again."""
    root = _root(folder)
    with _bar("reading headers") as progress:
        found = survey(root, progress)
    models, tenants = _sums(found.chunks, _model_fields), _sums(found.chunks, _tenant_fields)
    aside = {"set_aside": found.aside.files, "set_aside_bytes": found.aside.num_bytes}
    totals = {"store": str(root), **_totals(found.chunks), **_odd_counts(found), **aside}
    if as_json:
        old = [_odd_row(file) for file in found.odd_of("old")]
        _print_json({**totals, "models": models, "tenants": tenants, "old_files": old})
        return
    _print_pairs(totals)
    _print_rows(models)
    _print_rows(tenants)
    _print_old(found.odd_of("old"))


def show_list(folder: Path | None, selection: Selection, *, as_json: bool) -> None:
    """Print one line, or JSON entry, for each chunk that is meant."""
    with _bar("reading headers") as progress:
        found = survey(_root(folder), progress)
    chunks = sorted(filter(selection.holds, found.chunks), key=lambda chunk: (chunk.stored_at, chunk.id))
    rows = [_row(chunk) for chunk in chunks]
    if as_json:
        _print_json({"chunks": rows})
        return
    for row in rows:
        stored = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["stored_at"]))
        typer.echo(
            f"{row['id']}  {row['tokens']:>7} tokens  {row['bytes']:>12} bytes  {row['tenant']:<12}  {stored}  "
            f"{_layout(row)}  {row['fingerprint'][:12]}"
        )


def show_check(folder: Path | None, *, repair: bool, as_json: bool, remove_old: bool = False) -> int:
    """Verify all files and print what is wrong; 1 where there is damage that stays."""
    with _bar("checking chunks") as progress:
        found = maintenance.check(_root(folder), repair=repair, remove_old=remove_old, progress=progress)
    damaged = found.odd_of("damaged")
    if as_json:
        odd: dict[str, Any] = {kind: [_odd_row(file) for file in found.odd_of(kind)] for kind in ODD_KINDS}
        _print_json({**_totals(found.chunks), **odd, "repaired": repair, "old_removed": remove_old})
    else:
        for file in found.odd:
            typer.echo(f"{file.kind:<9}  {file.path}: {file.reason}")
        counts = ", ".join(f"{count} {kind}" for kind, count in _odd_counts(found).items())
        done = "; damaged files were set aside, leftovers removed" if repair else ""
        done += "; old files were removed" if remove_old else ""
        typer.echo(f"{len(found.chunks)} chunks are whole; {counts}{done}")
    return 1 if damaged and not repair else 0


def evict_chunks(folder: Path | None, selection: Selection, bytes_max: int | None, *, as_json: bool) -> None:
    """Remove the chunks that are meant."""
    with _bar("removing chunks") as progress:
        removal = maintenance.evict(_root(folder), selection, bytes_max=bytes_max, progress=progress)
    _print_removal(removal, as_json=as_json)


def clear_store(folder: Path | None, *, sure: bool, as_json: bool) -> None:
    """Remove everything. BadInput without a yes: refused, or nobody there to ask."""
    root = _root(folder)
    if not sure:
        if not sys.stdin.isatty():
            raise BadInput(f"every chunk in {root} would be removed: give --yes")
        if not typer.confirm(f"Remove every chunk in {root}?", err=True):
            raise BadInput("nothing was removed")
    with _bar("removing chunks") as progress:
        removal = maintenance.clear(root, progress=progress)
    _print_removal(removal, as_json=as_json)


def export_store(folder: Path | None, archive: Path, selection: Selection, *, as_json: bool) -> int:
    """Write the chunks that are meant to a tar file; 1 where damaged ones were left out."""
    with _bar("writing chunks") as progress:
        report = export_chunks(_root(folder), archive, selection, progress)
    if as_json:
        damaged = [{"id": chunk_id, "reason": reason} for chunk_id, reason in report.damaged]
        _print_json({"chunks": report.chunks, "bytes": report.file_bytes, "damaged": damaged})
    else:
        for chunk_id, reason in report.damaged:
            typer.echo(f"left out  {chunk_id}: {reason}")
        typer.echo(f"{report.chunks} chunks, {report.file_bytes} bytes, are in {archive}")
    return 1 if report.damaged else 0


def import_store(folder: Path | None, archive: Path, *, as_json: bool) -> int:
    """Take in the chunks of a tar file; 1 where members were refused. CommandError where it breaks off."""
    try:
        with _bar("reading the archive") as progress:
            report = import_chunks(_root(folder), archive, progress)
    except ArchiveDamaged as error:
        kept = f"{error.report.stored} chunks were stored before that"
        raise CommandError(f"archive {archive}: {error}; {kept}") from error
    if as_json:
        refused = [{"name": name, "reason": reason} for name, reason in report.reasons]
        _print_json(
            {
                "stored": report.stored,
                "bytes": report.stored_bytes,
                "present": report.present,
                "refused": report.refused,
                "reasons": refused,
            }
        )
    else:
        for name, reason in report.reasons:
            typer.echo(f"refused  {name}: {reason}")
        typer.echo(
            f"{report.stored} chunks, {report.stored_bytes} bytes, were stored; {report.present} were there already, "
            f"{report.refused} members were refused"
        )
    return 1 if report.refused else 0


def _root(folder: Path | None) -> Path:
    return folder or default_store_folder()


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """A progress bar on stderr; it is fed by what the block gets."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _model_fields(chunk: ChunkInfo) -> dict[str, Any]:
    shape = chunk.shape
    return {
        "fingerprint": chunk.fingerprint,
        "layers": shape.num_layers,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
    }


def _tenant_fields(chunk: ChunkInfo) -> dict[str, Any]:
    return {"tenant": tag_of(chunk.tenant)}


def _row(chunk: ChunkInfo) -> dict[str, Any]:
    sizes = {"tokens": chunk.num_tokens, "bytes": chunk.file_bytes, "stored_at": chunk.stored_at}
    return {"id": chunk.id, **_tenant_fields(chunk), **sizes, **_model_fields(chunk)}


def _layout(row: dict[str, Any]) -> str:
    return f"{row['layers']}x{row['kv_heads']}x{row['head_dim']} {row['dtype']}"


def _sums(chunks: Iterable[ChunkInfo], fields: Callable[[ChunkInfo], dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each group of equal `fields`, with its chunks, tokens and bytes."""
    groups: dict[tuple[Any, ...], list[ChunkInfo]] = {}
    for chunk in chunks:
        groups.setdefault(tuple(fields(chunk).values()), []).append(chunk)
    return [{**fields(group[0]), **_totals(group)} for _, group in sorted(groups.items())]


def _totals(chunks: Sequence[ChunkInfo]) -> dict[str, Any]:
    return {
        "chunks": len(chunks),
        "tokens": sum(chunk.num_tokens for chunk in chunks),
        "bytes": sum(chunk.file_bytes for chunk in chunks),
    }


def _odd_counts(found: Survey) -> dict[str, int]:
    return {kind: len(found.odd_of(kind)) for kind in ODD_KINDS}


def _odd_row(file: OddFile) -> dict[str, Any]:
    version = {} if file.version is None else {"version": file.version}
    return {"file": str(file.path), **version, "reason": file.reason}


def _print_old(files: Sequence[OddFile]) -> None:
    """The first few of them, and what can be done about all."""
    for file in files[:_OLD_SHOWN_MAX]:
        typer.echo(f"old  {file.path}: {file.reason}")
    if files:
        typer.echo(f"{len(files)} old files are never read; `kvblend store check --remove-old` removes them")


def _print_removal(removal: maintenance.Removal, *, as_json: bool) -> None:
    chunks, file_bytes, chunks_left, bytes_left = removal
    if as_json:
        _print_json({"chunks": chunks, "bytes": file_bytes, "chunks_left": chunks_left, "bytes_left": bytes_left})
    else:
        typer.echo(f"{chunks} chunks, {file_bytes} bytes, were removed; {chunks_left}, {bytes_left} bytes, are left")


def _print_json(fields: dict[str, Any]) -> None:
    typer.echo(json.dumps(fields))


def _print_pairs(fields: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(*rows[0], box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row.values()))
    Console().print(table)
