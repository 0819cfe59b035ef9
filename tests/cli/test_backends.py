from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta
from kvblend.actors.settings import Settings
from kvblend.api.server.keys import KeyRing, issue
from kvblend.cli.backends import Question, check_question, open_local, open_remote
from kvblend.cli.failures import BadInput
from tests.api.scripted import ScriptedSystem, hold, serving


def test_a_question_is_checked_as_a_server_would() -> None:
    request = check_question(Question("what?", ("a",), mode="full", max_tokens=3), "m")
    assert (request.documents[0].text, request.blend.mode, request.sampling.max_tokens) == ("a", "full", 3)
    with pytest.raises(BadInput, match="--query is empty"):
        check_question(Question(""), "m")


async def test_leaving_an_answer_early_abandons_it(local_system: list[Any], tmp_path: Path) -> None:
    async with open_local(Settings(), "m", tmp_path) as backend:
        system = local_system[0][0]
        system.script = hold
        async with contextlib.aclosing(backend.answer(Question("what?"))) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    break
        assert len(system.abandoned) == 1
        await system.close()


async def test_a_failed_request_raises_what_the_system_said(local_system: list[Any], tmp_path: Path) -> None:
    async def fail(_request: object, _stream: object) -> None:
        raise RuntimeError("layer 3 broke")

    async with open_local(Settings(), "m", tmp_path) as backend:
        local_system[0][0].script = fail
        with pytest.raises(RequestError, match="layer 3 broke"):
            await backend.ingest(["a"], None, lambda _done, _total: None)


async def test_what_is_no_address_is_bad_input() -> None:
    with pytest.raises(BadInput, match="is not an address"):
        async with open_remote("nowhere", None):
            pass


async def test_a_server_is_shown_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant, key = issue("alice")
    monkeypatch.setenv("KVBLEND_API_KEY", key)
    async with (
        serving(ScriptedSystem(), keys=KeyRing([tenant])) as server,
        open_remote(server.url, None) as backend,
    ):
        assert [event async for event in backend.answer(Question("what?"))]


async def test_a_key_that_is_none_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_API_KEY", "a\nb")
    with pytest.raises(BadInput, match=r"^api_key must be printable"):
        async with open_remote("ws://127.0.0.1:1", None):
            pass
