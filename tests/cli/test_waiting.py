from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvblend.actors.settings import Settings
from kvblend.actors.streams import TokenStream
from kvblend.cli import waiting
from kvblend.cli.backends import Question, open_local
from tests.api.scripted import Ready, ScriptedSystem


async def ask_while(
    state: str, judged: asyncio.Event, local_system: list[Any], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    submit, looked = ScriptedSystem.submit, asyncio.Event()

    def ready(self: ScriptedSystem) -> Ready:
        looked.set()
        return Ready(details={"gate": {"state": state}})

    async def wait_and_submit(self: ScriptedSystem, request: Any) -> TokenStream:
        await looked.wait()
        await judged.wait()
        return await submit(self, request)

    monkeypatch.setattr(ScriptedSystem, "ready", ready)
    monkeypatch.setattr(ScriptedSystem, "submit", wait_and_submit)
    monkeypatch.setattr(waiting, "QUIET_S", 0.0)
    judged.set()
    async with open_local(Settings(), "tiny", folder) as backend:
        async for _ in backend.answer(Question("what?")):
            pass


async def test_a_question_that_waits_for_the_gate_says_so(
    local_system: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask_while("running", asyncio.Event(), local_system, monkeypatch, tmp_path)
    assert capsys.readouterr().err == waiting.JUDGING.format(model="tiny") + "\n"


async def test_other_waiting_says_nothing(
    local_system: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask_while("passed", asyncio.Event(), local_system, monkeypatch, tmp_path)
    assert capsys.readouterr().err == ""


async def test_a_request_that_is_taken_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    system: Any = ScriptedSystem()
    system.readiness = Ready(details={"gate": {"state": "running"}})
    with waiting.told_while_judged(system):
        pass
    assert capsys.readouterr().err == ""
