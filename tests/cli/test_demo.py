from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvblend.actors.messages import Usage
from kvblend.cli import demo as module
from kvblend.cli.answers import Answer
from kvblend.cli.app import app
from kvblend.samples import load
from tests.api.scripted import ScriptedSystem, serving


def test_no_sample_follows_the_one_it_followed_before() -> None:
    samples = load()
    mixed = module.shuffled(samples)
    assert sorted(s.title for s in mixed) == sorted(s.title for s in samples)
    neighbours = set(itertools.pairwise(samples))
    assert not neighbours & set(itertools.pairwise(mixed))


def test_the_table_has_both_times_and_their_ratio() -> None:
    full = Answer("same", (1, 2), Usage(mode="full", ttft_ms=900.0), "stop")
    blend = Answer("same", (1, 2), Usage(mode="blend", ttft_ms=300.0), "stop")
    cells = [[str(cell) for cell in column.cells] for column in module.comparison(full, blend).columns]
    rows = dict(zip(cells[0], zip(cells[1], cells[2], strict=True), strict=True))
    assert rows["time to first token, ms"] == ("900", "300")
    assert rows["faster by"] == ("1.0x", "3.0x")
    assert rows["same leading tokens"] == ("", "100%")
    assert rows["same answer"] == ("", "yes")


async def test_the_demo_ingests_and_asks_four_times(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(ScriptedSystem()) as server:
        line = f"print('listening on {server.url}', flush=True); import time; time.sleep(60)"
        monkeypatch.setattr(module, "serve_command", lambda _model, _store: [sys.executable, "-c", line])
        # a thread has no signal handlers to set
        monkeypatch.setattr(module, "_end_on_sigterm", lambda: None)
        arguments = ["demo", "--model", str(model_folder), "--max-tokens", "5"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    requests = server.system.requests
    assert [request.generate for request in requests] == [False, True, True, True, True]
    assert [request.blend.mode for request in requests[1:]] == ["full", "full", "blend", "blend"]
    assert len({request.documents for request in requests[1:]}) == 1
    assert requests[0].documents != requests[1].documents
    assert "What to type next" in result.stdout
