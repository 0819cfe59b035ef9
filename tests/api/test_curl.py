"""curl, unmodified, as a user runs it: against a real `kvblend serve` with API keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from needed import find_program, install_program, need_program
from serve_process import ServeProcess, run, served
from small_system import TEXTS

pytestmark = pytest.mark.timeout(300)
INSTALL_S = 120.0
DOCUMENTS = [{"text": text} for text in TEXTS]


@pytest.fixture(scope="module")
def curl() -> str:
    def find() -> str | None:
        return find_program(["curl"])

    def install() -> None:
        install_program("curl", ["curl"], find, INSTALL_S)

    return need_program(find, install, "no curl is installed", "what is said to curl is not tested")


class Shell:
    """Runs curl against the server, with the key of a user."""

    def __init__(self, program: str, server: ServeProcess, key: str) -> None:
        self._program, self._server, self.key = program, server, key

    async def __call__(self, path: str, body: object = None, *flags: str, key: str | None = None) -> tuple[int, str]:
        """Status and body of one call; a body makes it a POST."""
        words = ["-sS", "-w", "\\n%{http_code}", "-H", f"Authorization: Bearer {key or self.key}", *flags]
        if body is not None:
            words += ["-H", "Content-Type: application/json", "--data-binary", json.dumps(body)]
        url = f"http://127.0.0.1:{self._server.port}{path}"
        process = await asyncio.create_subprocess_exec(
            self._program, *words, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        text, _, status = out.decode().rpartition("\n")
        return int(status), text


@pytest.fixture
async def shell(curl: str, tmp_path: Path) -> AsyncIterator[Shell]:
    model = save_llama(tmp_path / "tiny", num_hidden_layers=2, max_position_embeddings=2048)
    keys = tmp_path / "keys.toml"
    code, said = await run("keys", "add", "alice", "--keys-file", str(keys))
    assert code == 0, said
    key = next(word for word in said.split() if word.startswith("kvb"))
    async with served(model, tmp_path / "store", "--keys-file", str(keys)) as server:
        yield Shell(curl, server, key)


async def test_the_second_question_finds_the_chunks_and_streams_the_same_answer(shell: Shell) -> None:
    def chat(question: str, documents: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"messages": messages, "documents": documents, "max_tokens": 4, "temperature": 0, **more}

    status, first = await shell("/v1/chat/completions", chat("one?", DOCUMENTS))
    assert (status, json.loads(first)["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
    again = chat("two?", DOCUMENTS[::-1])
    status, second = await shell("/v1/chat/completions", again)
    answer = json.loads(second)
    assert (status, answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (200, True)
    status, streamed = await shell("/v1/chat/completions", {**again, "stream": True}, "-N")
    lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: ")]
    assert (status, lines[-1]) == (200, "[DONE]")
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert "".join(pieces) == answer["choices"][0]["message"]["content"]


async def test_models_are_listed_for_those_with_a_key(shell: Shell) -> None:
    status, listed = await shell("/v1/models")
    assert (status, [model["object"] for model in json.loads(listed)["data"]]) == (200, ["model"])
    status, refused = await shell("/v1/models", key="kvb-wrong")
    assert (status, json.loads(refused)["error"]["code"]) == (401, "unauthorized")


async def test_a_mistake_in_a_body_is_named(shell: Shell) -> None:
    status, said = await shell("/v1/completions", {"prompt": "x", "max_tokens": "many"})
    assert (status, json.loads(said)["error"]["param"]) == (400, "max_tokens")
