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


def test_one_bad_file_starts_nothing(local_system: list[Any], model_folder: Path, tmp_path: Path) -> None:
    files = write(tmp_path, "a.md")
    result = invoke("--model", model_folder, *files, tmp_path / "missing.md")
    assert result.exit_code == 2
    assert local_system == []


def test_no_file_is_a_usage_error() -> None:
    assert invoke().exit_code == 2


async def test_a_server_stores_as_well(cache: Path, tmp_path: Path) -> None:
    files = write(tmp_path, "a.md")
    async with serving(ScriptedSystem()) as server:
        result = await asyncio.to_thread(invoke, "--url", server.url, *files)
    assert result.exit_code == 0, result.output
    assert "chunk-0" in result.stdout
    assert server.system.requests[0].documents[0].text == "the text of a.md"
