"""`kvblend ingest`: store the KV of text files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvblend.actors.messages import StoredChunk
from kvblend.cli.backends import Backend, open_local, open_remote
from kvblend.cli.inputs import read_texts
from kvblend.cli.loops import run
from kvblend.cli.models import resolve_model

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings


def ingest_on_server(url: str, model: str | None, files: Sequence[Path], system: str | None) -> None:
    """Store the files' chunks on a server."""
    texts = read_texts(files)
    _ingest(open_remote(url, model), files, texts, system)


def ingest_here(settings: Settings, files: Sequence[Path], system: str | None) -> None:
    """Store the files' chunks with a system of this process."""
    texts = read_texts(files)
    name, path = resolve_model(settings.model)
    _ingest(open_local(settings, name, path), files, texts, system)


def ingest_progress(console: Console) -> Progress:
    """A bar counting documents."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _ingest(
    opening: AbstractAsyncContextManager[Backend], files: Sequence[Path], texts: list[str], system: str | None
) -> None:
    async def main() -> list[StoredChunk]:
        with ingest_progress(Console(stderr=True)) as progress:
            task = progress.add_task("storing chunks", total=len(texts))
            async with opening as backend:
                stored = await backend.ingest(texts, system, lambda done, _: progress.update(task, completed=done))
                progress.update(task, completed=len(stored))
                return stored

    for file, chunk in zip(files, run(main()), strict=True):
        state = "stored" if chunk.created else "was there"
        typer.echo(f"{chunk.id}  {chunk.tokens:>6} tokens  {state:<9}  {file}")
