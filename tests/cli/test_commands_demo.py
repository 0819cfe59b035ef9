from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvblend.cli import demo as module
from kvblend.cli.app import app
from tests.api.scripted import ScriptedSystem, serving


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
    assert [request.blend.mode for request in requests[1:]] == ["full", "blend", "full", "blend"]
    assert len({request.documents for request in requests[1:]}) == 1
    assert requests[0].documents != requests[1].documents
    assert "What to type next" in result.stdout
