from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from raw_http import call

from tests.api.scripted import ScriptedSystem, Server, serving

GOOD, BAD = "https://good.example", "https://bad.example"
ASK = {"messages": [{"role": "user", "content": "q"}]}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem(), origins=(GOOD,)) as running:
        yield running


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/wings"])
async def test_a_request_id_is_echoed(server: Server, path: str) -> None:
    answer = await call(server.port, "GET", path, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "\xe4"])
async def test_a_request_without_a_good_id_gets_one(server: Server, given: str) -> None:
    answer = await call(server.port, "GET", "/health", headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_page_of_foreign_origin_is_refused(server: Server) -> None:
    answer = await call(server.port, "POST", "/v1/chat/completions", ASK, {"Origin": BAD})
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert server.system.requests == []


async def test_a_page_of_listed_origin_may_read_the_answer(server: Server) -> None:
    answer = await call(server.port, "POST", "/v1/chat/completions", ASK, {"Origin": GOOD})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, GOOD)


async def test_a_page_of_listed_origin_may_ask_first(server: Server) -> None:
    headers = {
        "Origin": GOOD,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    answer = await call(server.port, "OPTIONS", "/v1/chat/completions", headers=headers)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, GOOD)


async def test_a_page_of_this_server_is_no_foreigner(server: Server) -> None:
    assert (await call(server.port, "GET", "/v1/models", headers={"Origin": "http://test"})).status == 200
