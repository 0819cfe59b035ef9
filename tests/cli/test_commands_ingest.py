from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Generate
from kvblend.actors.streams import TokenStream
from kvblend.cli.app import app
from tests.api.scripted import ScriptedSystem, serving


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ingest", *map(str, arguments)])


def write(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).write_text(f"the text of {name}")
    return [folder / name for name in names]


MILL = ("the mill by the river", "the old mill by the river", "cats sleep all day")


def write_corpus(folder: Path) -> list[Path]:
    for number, text in enumerate(MILL):
        (folder / f"{number}.md").write_text(text)
    return [folder / f"{number}.md" for number in range(len(MILL))]


def test_one_bad_file_starts_nothing(local_system: list[Any], model_folder: Path, tmp_path: Path) -> None:
    files = write(tmp_path, "a.md")
    result = invoke("--model", model_folder, *files, tmp_path / "missing.md")
    assert result.exit_code == 2
    assert local_system == []


def test_no_file_is_a_usage_error() -> None:
    assert invoke().exit_code == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--condition-on", "neighbours:9"), "K in 1..8"),
        (("--condition-on", "neighbours:2", "--conditioning", "warm"), "--conditioning is 'warm'"),
        (("--url", "ws://127.0.0.1:1", "--conditioning", "warm"), "--conditioning is of no use with --url"),
        (("--conditioning", "cold"), "--conditioning must be system or bare or warm or neighbours; it is 'cold'"),
    ],
)
def test_bad_conditioning_is_refused_before_anything_starts(
    local_system: list[Any], model_folder: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    where = () if "--url" in flags else ("--model", model_folder)
    result = invoke(*where, *flags, *write_corpus(tmp_path))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert local_system == []


TOO_LONG = RequestError("too_large", "documents[1]: the prompt has 9 tokens", "documents[1]")


def test_the_file_of_a_document_that_is_too_long_is_named(
    local_system: list[Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: object, request: object) -> None:
        raise TOO_LONG

    monkeypatch.setattr(ScriptedSystem, "submit", refuse)
    result = invoke("--model", model_folder, *write(tmp_path, "a.md", "b.md"))
    assert result.exit_code == 2
    assert f"error: {tmp_path / 'b.md'}: the prompt has 9 tokens\n" in result.stderr


async def test_a_server_that_refuses_a_document_of_a_later_batch_names_its_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvblend.api.client.client.BATCH_DOCUMENTS_MAX", 2)
    system = ScriptedSystem()
    submit = system.submit

    async def refuse_second(request: Generate) -> TokenStream:
        if system.requests:
            raise TOO_LONG
        return await submit(request)

    monkeypatch.setattr(system, "submit", refuse_second)
    async with serving(system) as server:
        files = write(tmp_path, "a.md", "b.md", "c.md", "d.md")
        result = await asyncio.to_thread(invoke, "--url", server.url, *files)
    assert result.exit_code == 2
    assert f"error: {tmp_path / 'd.md'}: the prompt has 9 tokens\n" in result.stderr


def test_the_environment_reaches_the_settings(
    local_system: list[Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBLEND_MODEL", str(model_folder))
    monkeypatch.setenv("KVBLEND_CONDITIONING", "bare")
    result = invoke(*write(tmp_path, "a.md"))
    assert result.exit_code == 0, result.output
    settings = local_system[0][1]
    assert (settings.conditioning, settings.gate) == ("bare", "off")


@pytest.mark.parametrize(("flags", "echo"), [((), True), (("--no-echo",), False)])
def test_the_second_form_of_chunks_can_be_left_out(
    local_system: list[Any], model_folder: Path, tmp_path: Path, flags: tuple[str, ...], echo: bool
) -> None:
    result = invoke("--model", model_folder, "--conditioning", "warm", *flags, *write_corpus(tmp_path))
    assert result.exit_code == 0, result.output
    settings = local_system[0][1]
    assert (settings.conditioning, settings.echo) == ("warm", echo)
