from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from kvblend.cli.app import app
from tests.api.scripted import ScriptedSystem, serving


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ingest", *map(str, arguments)])


def write(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).write_text(f"the text of {name}")
    return [folder / name for name in names]


def test_every_file_is_stored_and_listed(local_system: list[Any], model_folder: Path, tmp_path: Path) -> None:
    files = write(tmp_path, "a.md", "b.md")
    result = invoke("--model", model_folder, "--system", "s", *files)
    assert result.exit_code == 0, result.output
    system = local_system[0][0]
    request = system.requests[0]
    assert (request.generate, request.system) == (False, "s")
    assert [line.split()[-1] for line in result.stdout.splitlines()] == [str(file) for file in files]
    assert system.settled == 1


async def test_a_server_stores_as_well(cache: Path, tmp_path: Path) -> None:
    files = write(tmp_path, "a.md")
    async with serving(ScriptedSystem()) as server:
        result = await asyncio.to_thread(invoke, "--url", server.url, *files)
    assert result.exit_code == 0, result.output
    assert "chunk-0" in result.stdout
    assert server.system.requests[0].documents[0].text == "the text of a.md"


MILL = ("the mill by the river", "the old mill by the river", "cats sleep all day")


def write_corpus(folder: Path) -> list[Path]:
    for number, text in enumerate(MILL):
        (folder / f"{number}.md").write_text(text)
    return [folder / f"{number}.md" for number in range(len(MILL))]


def test_files_are_stored_behind_those_most_like_them(
    local_system: list[Any], model_folder: Path, tmp_path: Path
) -> None:
    result = invoke("--model", model_folder, "--condition-on", "neighbours:1", *write_corpus(tmp_path))
    assert result.exit_code == 0, result.output
    system, settings, _ = local_system[0]
    documents = system.requests[0].documents
    assert [[near.text for near in document.behind] for document in documents] == [[MILL[1]], [MILL[0]], [MILL[0]]]
    assert settings.conditioning == "neighbours"


def test_without_condition_on_no_file_has_neighbours(
    local_system: list[Any], model_folder: Path, tmp_path: Path
) -> None:
    result = invoke("--model", model_folder, "--conditioning", "warm", *write_corpus(tmp_path))
    assert result.exit_code == 0, result.output
    system, settings, _ = local_system[0]
    assert [document.behind for document in system.requests[0].documents] == [()] * 3
    assert settings.conditioning == "warm"


async def test_neighbours_travel_to_a_server(cache: Path, tmp_path: Path) -> None:
    files = write_corpus(tmp_path)
    async with serving(ScriptedSystem()) as server:
        result = await asyncio.to_thread(invoke, "--url", server.url, "--condition-on", "neighbours:2", *files)
    assert result.exit_code == 0, result.output
    assert [near.text for near in server.system.requests[0].documents[2].behind] == [MILL[0], MILL[1]]
