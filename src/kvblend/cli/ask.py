"""`kvblend ask`: one question over chunk files."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from kvblend.cli.answers import Answer, figures_table, read_answer
from kvblend.cli.backends import Backend, Question, check_question, open_local, open_remote
from kvblend.cli.failures import CommandError
from kvblend.cli.loops import run
from kvblend.cli.models import resolve_model
from kvblend.cli.naming import naming

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings


def ask_server(url: str, model: str | None, question: Question, *, as_json: bool) -> None:
    """Ask a server."""
    check_question(question, model or "")
    _ask(open_remote(url, model), question, as_json=as_json)


def ask_here(settings: Settings, question: Question, *, as_json: bool) -> None:
    """Ask a system of this process; what is wrong with the question is said before a model is loaded."""
    from kvblend.actors.selection import merge_selection

    request = check_question(question, settings.model)
    with naming(question.names()):
        merge_selection(settings, request.blend)
    name, path = resolve_model(settings.model)
    _ask(open_local(settings, name, path), question, as_json=as_json)


def _ask(opening: AbstractAsyncContextManager[Backend], question: Question, *, as_json: bool) -> None:
    async def main() -> Answer:
        async with opening as backend:
            return await read_answer(backend.answer(question), None if as_json else _show)

    answer = run(main())
    if as_json:
        typer.echo(json.dumps(answer.fields(), ensure_ascii=False))
    else:
        typer.echo()
        Console(stderr=True).print(figures_table(answer))
    if answer.finish_reason == "cancelled":
        # what was printed looks like an answer and is only the beginning of one
        raise CommandError("the answer is cut short: the server cancelled it")


def _show(text: str) -> None:
    typer.echo(text, nl=False)
