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
from kvblend.api.client.wire import DocumentLike
from kvblend.cli.backends import Backend, open_local, open_remote
from kvblend.cli.inputs import read_texts
from kvblend.cli.loops import run
from kvblend.cli.models import resolve_model
from kvblend.cli.neighbours import choose_neighbours

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings


def ingest_on_server(
    url: str, model: str | None, files: Sequence[Path], system: str | None, neighbours: int = 0
) -> None:
    """Store the files' chunks on a server; each behind so many of the files that are most like it."""
    documents = read_documents(files, neighbours)
    _ingest(open_remote(url, model), files, documents, system)


def ingest_here(settings: Settings, files: Sequence[Path], system: str | None, neighbours: int = 0) -> None:
    """Store the files' chunks with a system of this process; see `ingest_on_server`."""
    documents = read_documents(files, neighbours)
    name, path = resolve_model(settings.model)
    _ingest(open_local(settings, name, path), files, documents, system)


def read_documents(files: Sequence[Path], neighbours: int) -> list[DocumentLike]:
    """The files' texts, with `neighbours` of them behind each where that is not 0. BadInput for a bad file."""
    texts = read_texts(files)
    if not neighbours:
        return list(texts)
    chosen = choose_neighbours(texts, neighbours)
    return [{"text": text, "behind": list(near)} for text, near in zip(texts, chosen, strict=True)]


def ingest_progress(console: Console) -> Progress:
    """A bar counting documents."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _ingest(
    opening: AbstractAsyncContextManager[Backend],
    files: Sequence[Path],
    documents: Sequence[DocumentLike],
    system: str | None,
) -> None:
    async def main() -> list[StoredChunk]:
        with ingest_progress(Console(stderr=True)) as progress:
            task = progress.add_task("storing chunks", total=len(documents))
            async with opening as backend:

                def show(done: int, _: int) -> None:
                    progress.update(task, completed=done)

                stored = await backend.ingest(documents, system, show, files)
                progress.update(task, completed=len(stored))
                return stored

    for file, chunk in zip(files, run(main()), strict=True):
        state = "stored" if chunk.created else "was there"
        typer.echo(f"{chunk.id}  {chunk.tokens:>6} tokens  {state:<9}  {chunk.conditioning:<10}  {file}")
