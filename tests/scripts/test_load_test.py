"""scripts/load_test.py as a user runs it, against the scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from typing import Any

import psutil
import pytest

from kvblend.actors.errors import RequestError
from tests.api.scripted import ScriptedSystem, hold, serving

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "load_test.py"


async def start(*arguments: str, cwd: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), "--disable-tqdm", *arguments),
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # a shell that starts the tests in the background has them, and what they start, ignore interrupts
        preexec_fn=hear_interrupts,
    )


def hear_interrupts() -> None:
    signal(SIGINT, SIG_DFL)


async def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = await start(*arguments, cwd=cwd)
    async with asyncio.timeout(90):
        out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


def complaints(error: str) -> list[str]:
    """What was said of failures; that a busy machine sent late is none."""
    return [line for line in error.splitlines() if "the client itself was" not in line]


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("backend", ["openai-chat", "openai", "kvblend"])
async def test_every_request_is_answered_and_accounted_for(backend: str, tmp_path: Path) -> None:
    async with serving(ScriptedSystem()) as server:
        line = f"--backend {backend} --port {server.port} --num-prompts 24 --request-rate 200 --processes 2"
        line += " --chunk-tokens 5 --save-result --save-detailed --result-filename r.json"
        code, out, error = await run(*line.split(), cwd=tmp_path)
        asked = server.system.requests
    assert (code, complaints(error)) == (0, [])
    assert "Serving Benchmark Result" in out
    result = read(tmp_path / "r.json")
    assert (result["completed"], result["failed"], result["model_id"]) == (24, 0, "scripted")
    # the scripted answer has 100 tokens of prompt, 3 of answer, 60 reused, and a missed chunk
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (2400, 72)
    assert (result["total_cached_tokens"], result["reuse"]["partial_hit"]["completed"]) == (1440, 24)
    assert set(result["generated_texts"]) == {"one two three"}
    # of a plain prompt the engine makes the chunks
    assert {len(r.documents) or len(str(r.prompt).split(" # # ")) - 2 for r in asked} == {6}


@pytest.mark.parametrize("backend", ["openai-chat", "kvblend"])
async def test_clients_that_misbehave(backend: str, tmp_path: Path) -> None:
    async with serving(ScriptedSystem()) as server:
        line = f"--backend {backend} --port {server.port} --num-prompts 40 --max-concurrency 8 --output-len 2"
        line += " --cancel-rate 0.3 --disconnect-rate 0.3 --slow-reader-rate 0.2 --slow-reader-ms 1"
        line += " --save-result --result-filename r.json"
        code, _, error = await run(*line.split(), cwd=tmp_path)
    assert (code, complaints(error)) == (0, [])
    result = read(tmp_path / "r.json")
    kinds = [result[key] for key in ("completed", "cancelled", "disconnected")]
    assert sum(kinds) == 40
    assert min(kinds) > 0
    assert result["max_concurrent_requests"] <= 8


async def test_several_rates_have_files_a_table_and_a_picture(tmp_path: Path) -> None:
    async with serving(ScriptedSystem()) as server:
        line = f"--base-url http://127.0.0.1:{server.port}/v1 --num-prompts 4 --request-rate 100,inf --warm-pool"
        line += " --chunk-pool 12 --save-result --result-filename r.json --plot p.png"
        code, out, error = await run(*line.split(), cwd=tmp_path)
        asked = len(server.system.requests)
    assert (code, complaints(error)) == (0, [])
    assert set(os.listdir(tmp_path)) == {"r-100qps.json", "r-infqps.json", "p.png"}
    assert [read(tmp_path / f"r-{rate}qps.json")["request_rate"] for rate in ("100", "inf")] == [100.0, "inf"]
    assert "median TTFT ms" in out
    # twelve chunks by six are two warming requests, before each rate
    assert asked == 2 * (2 + 4)


async def test_failed_requests_are_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    system = ScriptedSystem()
    system.refusal = RequestError("overloaded", "no room")
    async with serving(system) as server:
        code, out, error = await run("--port", str(server.port), "--num-prompts", "3", cwd=tmp_path)
    assert code == 1
    assert "Failed requests:                         3" in out
    assert "failed 3 times: RequestFailed: HTTP 503" in error


async def test_an_answer_without_end_fails_when_its_time_is_over(tmp_path: Path) -> None:
    async with serving(ScriptedSystem(hold)) as server:
        line = f"--port {server.port} --num-prompts 2 --timeout 0.5"
        code, _, error = await run(*line.split(), cwd=tmp_path)
    assert (code, complaints(error)) == (1, ["load_test.py: failed 2 times: no end within 0.5 s"])


@pytest.mark.parametrize(("what", "code"), [("interrupt", 130), ("kill a sender", 2)])
async def test_a_run_that_is_stopped_leaves_no_process(what: str, code: int, tmp_path: Path) -> None:
    async with serving(ScriptedSystem(hold)) as server:
        process = await start(*f"--port {server.port} --num-prompts 2 --processes 2".split(), cwd=tmp_path)
        async with asyncio.timeout(60):
            await server.system.until(lambda: len(server.system.requests) == 2)
        children = psutil.Process(process.pid).children()
        if what == "interrupt":
            process.send_signal(SIGINT)
        else:
            next(child for child in children if "spawn_main" in " ".join(child.cmdline())).kill()
        async with asyncio.timeout(60):
            await process.communicate()
    assert process.returncode == code
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


async def test_without_a_server_nothing_is_sent(tmp_path: Path) -> None:
    with socket.socket() as taken:
        # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        code, out, error = await run("--port", str(taken.getsockname()[1]), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert error.startswith("load_test.py: error: http://127.0.0.1:")


async def test_a_bad_option_ends_with_2(tmp_path: Path) -> None:
    code, out, error = await run("--burstiness", "0", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "argument --burstiness: 0 is not above 0" in error
