from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Finished, Generate, Usage
from kvblend.actors.streams import TokenStream
from kvblend.cli.app import app
from tests.api.scripted import ScriptedSystem, serving

KEYS = {
    "text",
    "mode",
    "ttft_ms",
    "total_ms",
    "prompt_tokens",
    "output_tokens",
    "chunk_hits",
    "chunk_misses",
    "tokens_reused",
    "tokens_recomputed",
    "tokens_fresh",
    "charged_ratio",
    "finish_reason",
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ask", *map(str, arguments)])


def test_json_is_one_object_with_exactly_the_promised_keys(local_system: list[Any], model_folder: Path) -> None:
    result = invoke("--model", model_folder, "--query", "what?", "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout.splitlines()[-1])
    assert set(fields) == KEYS
    assert (fields["text"], fields["finish_reason"], fields["tokens_reused"]) == ("one two three", "stop", 60)


def test_without_json_the_text_goes_to_stdout_and_the_table_to_stderr(
    local_system: list[Any], model_folder: Path
) -> None:
    result = invoke("--model", model_folder, "--query", "what?")
    assert result.stdout == "one two three\n"
    assert "time to first token" in result.stderr


def test_new_chunks_are_durable_before_it_returns(local_system: list[Any], model_folder: Path) -> None:
    invoke("--model", model_folder, "--query", "what?")
    assert local_system[0][0].settled == 1


def test_a_refusal_of_the_system_is_bad_input(
    local_system: list[Any], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: object, request: object) -> None:
        raise RequestError("invalid_request", "prompt: has 9000 tokens; the limit is 8192", "prompt")

    monkeypatch.setattr(ScriptedSystem, "submit", refuse)
    result = invoke("--model", model_folder, "--query", "what?")
    assert (result.exit_code, result.stderr) == (2, "error: prompt: has 9000 tokens; the limit is 8192\n")


async def test_a_server_answers_as_well(cache: Path) -> None:
    async with serving(ScriptedSystem()) as server:
        result = await asyncio.to_thread(invoke, "--url", server.url, "--query", "what?", "--json")
    assert json.loads(result.stdout)["text"] == "one two three"


async def test_a_failure_on_the_server_ends_with_1(cache: Path) -> None:
    async def fail(_request: object, _stream: object) -> None:
        raise RuntimeError("layer 3 broke")

    async with serving(ScriptedSystem(fail)) as server:
        result = await asyncio.to_thread(invoke, "--url", server.url, "--query", "what?")
    assert (result.exit_code, result.stderr) == (1, "error: layer 3 broke\n")


async def test_an_answer_that_the_server_cut_short_ends_with_1(cache: Path) -> None:
    async def cut(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Delta(request.request_id, "one two"))
        stream.push_nowait(Finished(request.request_id, "cancelled", Usage(), detail="the server is shutting down"))

    async with serving(ScriptedSystem(cut)) as server:
        result = await asyncio.to_thread(invoke, "--url", server.url, "--query", "what?", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["text"] == "one two"
    assert "cut short" in result.stderr
