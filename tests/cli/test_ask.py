from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Finished, Generate, SelectionOptions, Usage
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


def test_the_flags_reach_the_request(local_system: list[Any], model_folder: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(f"chunk {name}")
    chunks = ("--chunk-file", tmp_path / "b", "--chunk-file", tmp_path / "a")
    flags = ("--mode", "reuse", "--recompute-ratio", "0.3", "--max-tokens", "9", "--temperature", "0.5")
    store = ("--store", tmp_path / "store")
    result = invoke("--model", model_folder, *store, "--system", "be brief", *chunks, "--query", "what?", *flags)
    assert result.exit_code == 0, result.output
    system, settings, path = local_system[0]
    request = system.requests[0]
    assert (path, settings.store) == (model_folder, tmp_path / "store")
    assert [document.text for document in request.documents] == ["chunk b", "chunk a"]
    assert (request.system, request.messages[0].content) == ("be brief", "what?")
    assert (request.blend.mode, request.blend.recompute_ratio) == ("reuse", 0.3)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0.5)


def test_without_json_the_text_goes_to_stdout_and_the_table_to_stderr(
    local_system: list[Any], model_folder: Path
) -> None:
    result = invoke("--model", model_folder, "--query", "what?")
    assert result.stdout == "one two three\n"
    assert "time to first token" in result.stderr


def test_new_chunks_are_durable_before_it_returns(local_system: list[Any], model_folder: Path) -> None:
    invoke("--model", model_folder, "--query", "what?")
    assert local_system[0][0].settled == 1


def test_the_default_store_is_in_the_cache_folder(local_system: list[Any], model_folder: Path, cache: Path) -> None:
    invoke("--model", model_folder, "--query", "what?")
    assert local_system[0][1].store == cache / "store"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--query", " "), "input: is empty"),
        (("--query", "q", "--recompute-ratio", "1.5"), "recompute_ratio: is 1.5"),
        (("--query", "q", "--temperature", "nan"), "temperature: is nan"),
        (("--query", "q", "--blend", "span=0"), "span is 0; it must be a whole number in 1..4096"),
        (("--query", "q", "--blend", "thresholds=1,2"), "one entry per check layer, 1, and has 2"),
        (("--query", "q", "--blend", "thresholds=1", "--recompute-ratio", "0.1"), "give one of recompute_ratio and"),
        (("--query", "q", "--url", "ws://h", "--blend", "span=0"), "blend.span: is 0"),
        (("--query", "q", "--max-tokens", "0"), "max_output_tokens: is 0"),
        (("--query", "q", "--model", "nothing-here"), "neither a known name"),
        (("--query", "q", "--chunk-file", "nothing-here"), "cannot read nothing-here"),
        (("--query", "q", "--url", "ws://h", "--store", "s"), "--store is of no use with --url"),
        (("--query", "q", "--url", "ws://h", "--dtype", "bfloat16"), "--dtype is of no use with --url"),
        (("--query", "q", "--url", "h:1"), "is not an address"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    local_system: list[Any], arguments: tuple[str, ...], message: str
) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert local_system == []


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


def test_blend_options_reach_request_and_settings(local_system: list[Any], model_folder: Path) -> None:
    # the settings too: that is what is compared with the model before its weights are read
    invoke("--model", model_folder, "--query", "q?", "--blend", "selector=query", "--blend", "score_layers=1,2")
    system, settings, _ = local_system[0]
    wanted = SelectionOptions("query", score_layers=(1, 2))
    assert system.requests[0].blend.selection == wanted
    assert (settings.selector, settings.score_layers) == ("query", (1, 2))


async def test_blend_options_reach_a_server(cache: Path) -> None:
    system = ScriptedSystem()
    async with serving(system) as server:
        await asyncio.to_thread(invoke, "--url", server.url, "--query", "q?", "--blend", "check_layers=1,2")
    assert system.requests[0].blend.selection == SelectionOptions(check_layers=(1, 2))


def test_conditioning_is_a_setting_and_no_part_of_the_request(local_system: list[Any], model_folder: Path) -> None:
    result = invoke("--model", model_folder, "--query", "what?", "--conditioning", "warm", "--blend", "sinks=2")
    assert result.exit_code == 0, result.output
    system, settings, _ = local_system[0]
    assert (settings.conditioning, settings.sinks) == ("warm", 2)
    assert system.requests[0].blend.selection == SelectionOptions(sinks=2)
