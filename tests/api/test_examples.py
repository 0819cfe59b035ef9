"""The examples of docs/examples, run as a user would, against a server over a tiny model."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from model_files import save_llama
from raw_http import call
from small_system import running, serving_any

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


async def run_example(name: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_langchain_finds_the_chunks_of_its_first_question_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no proxy that the user may have is asked: nothing listens at this one
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    model = save_llama(tmp_path / "tiny", num_hidden_layers=4, max_position_embeddings=2048)
    async with running(model, store=tmp_path / "kv") as system, serving_any(system) as port:
        address = f"http://127.0.0.1:{port}/v1"
        said = await run_example("langchain_rag.py", "--base-url", address, "--model", "tiny", "--max-tokens", "4")
        figures = (await call(port, "GET", "/metrics")).body.decode()
    cold, warm = (int(found) for found in re.findall(r"(\d+) of \d+ prompt tokens were stored", said))
    hits = re.search(r'^kvblend:chunk_lookup_total{result="hit"} ([\d.]+)$', figures, re.MULTILINE)
    assert cold == 0
    assert warm > 100
    assert hits is not None
    # the same three documents, in another order
    assert float(hits[1]) == 3
