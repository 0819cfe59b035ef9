from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Sampling, SelectionOptions
from kvblend.cli.app import app
from tests.api.scripted import ScriptedSystem, serving


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ask", *map(str, arguments)])


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


def test_sampling_flags_reach_the_request(local_system: list[Any], model_folder: Path) -> None:
    flags = (
        *("--top-p", 0.9, "--top-k", 5, "--min-p", 0.1, "--repetition-penalty", 1.2, "--presence-penalty", 0.5),
        *("--frequency-penalty", -0.5, "--seed", 7, "--stop", "a", "--stop", "b", "--stop-token-id", 9),
        *("--min-tokens", 2, "--ignore-eos", "--logprobs", 3, "--json"),
    )
    result = invoke("--model", model_folder, "--query", "what?", *flags)
    assert result.exit_code == 0, result.output
    assert local_system[0][0].requests[0].sampling == Sampling(
        top_p=0.9,
        seed=7,
        stop=("a", "b"),
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop_token_ids=(9,),
        ignore_eos=True,
        min_tokens=2,
        logprobs=3,
    )


async def test_sampling_flags_reach_a_server(cache: Path) -> None:
    async with serving(ScriptedSystem()) as server:
        flags = ("--url", server.url, "--query", "what?", "--top-k", "4", "--seed", "3")
        await asyncio.to_thread(invoke, *flags)
        assert server.system.requests[0].sampling == Sampling(top_k=4, seed=3)


def test_the_default_store_is_in_the_cache_folder(local_system: list[Any], model_folder: Path, cache: Path) -> None:
    invoke("--model", model_folder, "--query", "what?")
    assert local_system[0][1].store == cache / "store"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--query", " "), "error: --query is empty"),
        (("--query", "q", "--recompute-ratio", "1.5"), "error: --recompute-ratio is 1.5"),
        (("--query", "q", "--recompute-ratio", "most"), "error: --recompute-ratio"),
        (("--query", "q", "--temperature", "nan"), "error: --temperature is nan"),
        (("--query", "q", "--blend", "span=0"), "error: --blend span is 0; it must be a whole number in 1..4096"),
        (("--query", "q", "--blend", "thresholds=1,2"), "one entry per check layer, 1, and has 2"),
        (("--query", "q", "--blend", "thresholds=1", "--recompute-ratio", "0.1"), "give one of recompute_ratio and"),
        (("--query", "q", "--url", "ws://h", "--blend", "span=0"), "error: --blend span is 0"),
        (("--query", "q", "--max-tokens", "0"), "error: --max-tokens is 0"),
        (("--query", "q", "--min-p", "2"), "error: --min-p is 2"),
        (("--query", "q", "--min-tokens", "200"), "error: --min-tokens is 200; the longest answer has 128"),
        (("--query", "q", "--stop-token-id", "-1"), "error: --stop-token-id is -1"),
        (("--query", "q", "--logprobs", "3"), "error: --logprobs needs --json"),
        (("--query", "q", "--logprobs", "30", "--json"), "error: --logprobs is 30"),
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


def test_a_file_and_the_environment_reach_the_settings(
    local_system: list[Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(f"model: {model_folder}\nsinks: 1\n")
    monkeypatch.setenv("KVBLEND_SPAN", "2")
    result = invoke("--config", tmp_path / "a.yaml", "--query", "what?", "--blend", "seed=3")
    assert result.exit_code == 0, result.output
    settings = local_system[0][1]
    assert (settings.model, settings.sinks, settings.span, settings.seed) == (str(model_folder), 1, 2, 3)


def test_a_refusal_names_the_file_of_a_document(
    local_system: list[Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: object, request: object) -> None:
        raise RequestError("invalid_request", "documents[1].text: has no tokens", "documents[1].text")

    monkeypatch.setattr(ScriptedSystem, "submit", refuse)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    chunks = ("--chunk-file", tmp_path / "a", "--chunk-file", tmp_path / "b")
    result = invoke("--model", model_folder, *chunks, "--query", "what?")
    assert (result.exit_code, result.stderr) == (2, f"error: {tmp_path / 'b'} has no tokens\n")
