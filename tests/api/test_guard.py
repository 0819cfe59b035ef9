from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator

import pytest
from raw_http import RawAnswer, call
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin, Subprotocol

from kvblend.api.server.guard import caller_of
from kvblend.api.server.keys import BEARER_SUBPROTOCOL, KeyRing, issue
from kvblend.api.server.openai.routes import TABLE
from kvblend.api.server.rates import RateLimits
from tests.api.scripted import Ready, ScriptedSystem, Server, serving

ALICE, KEY = issue("alice")
WATCH, WATCH_KEY = issue("watch", operator=True)
GOOD = "https://good.example"
ASK = {"messages": [{"role": "user", "content": "q"}]}
GUARDED = sorted(
    {(method, path) for method, path, _, _ in TABLE}
    | {("GET", path) for path in ("/ready", "/metrics", "/docs", "/openapi.json", "/v1/wings", "/health/", "/")}
    | {("OPTIONS", "/v1/models")}
)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem(), origins=(GOOD,), keys=KeyRing([ALICE, WATCH])) as running:
        yield running


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def subprotocol(key: str) -> str:
    return BEARER_SUBPROTOCOL + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


async def dial(server: Server, *names: str, key: str | None = None, query: str = "", origin: str | None = None) -> str:
    """The subprotocol that was agreed on; the status where the handshake was refused."""
    try:
        async with connect(
            f"{server.url}/v1/responses{query}",
            subprotocols=[Subprotocol(name) for name in names],
            additional_headers=None if key is None else bearer(key),
            origin=None if origin is None else Origin(origin),
            proxy=None,
        ) as socket:
            return str(socket.subprotocol)
    except InvalidStatus as error:
        return str(error.response.status_code)


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_every_route_wants_the_right_key(server: Server, method: str, path: str) -> None:
    answers: list[RawAnswer] = [
        await call(server.port, method, path, headers=headers)
        for headers in ({}, bearer("kvb_wrong"), {"Authorization": KEY}, bearer(KEY + "x"), bearer(KEY))
    ]
    assert [answer.status for answer in answers[:-1]] == [401] * 4
    assert answers[-1].status != 401
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert answers[0].error["code"] == "unauthorized"


async def test_health_wants_none(server: Server) -> None:
    assert (await call(server.port, "GET", "/health")).status == 200


async def test_a_key_in_the_url_opens_nothing(server: Server) -> None:
    for name in ("api_key", "key", "token", "access_token"):
        assert (await call(server.port, "GET", f"/v1/models?{name}={KEY}")).status == 401
    assert await dial(server, "kvblend.v1.json", query=f"?api_key={KEY}") == "401"


async def test_a_websocket_wants_the_right_key(server: Server) -> None:
    assert await dial(server, "kvblend.v1.json") == "401"
    assert await dial(server, "kvblend.v1.json", key="kvb_wrong") == "401"
    assert await dial(server, "kvblend.v1.json", key=KEY) == "kvblend.v1.json"


async def test_a_browser_shows_its_key_in_a_subprotocol(server: Server) -> None:
    assert await dial(server, "kvblend.v1.json", subprotocol(KEY), origin=GOOD) == "kvblend.v1.json"
    assert await dial(server, subprotocol(KEY), "kvblend.v1.json", origin=GOOD) == "kvblend.v1.json"
    assert await dial(server, "kvblend.v1.json", subprotocol("kvb_wrong"), origin=GOOD) == "401"


async def test_a_right_key_does_not_open_for_a_bad_origin(server: Server) -> None:
    assert await dial(server, "kvblend.v1.json", key=KEY, origin="https://bad.example") == "403"


async def test_the_key_is_never_the_subprotocol_agreed_on(server: Server) -> None:
    assert await dial(server, subprotocol(KEY)) == "400"


async def test_a_listed_page_may_ask_first_without_a_key_and_may_read_the_refusal(server: Server) -> None:
    asks = {"Origin": GOOD, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert (await call(server.port, "OPTIONS", "/v1/chat/completions", headers=asks)).status == 200
    refused = await call(server.port, "POST", "/v1/chat/completions", ASK, {"Origin": GOOD})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, GOOD)


async def test_without_keys_none_is_asked_for() -> None:
    async with serving(ScriptedSystem()) as server:
        assert (await call(server.port, "GET", "/v1/models")).status == 200
        assert (await call(server.port, "GET", "/v1/models", headers=bearer("any"))).status == 200


async def test_a_server_whose_keys_are_all_gone_is_closed() -> None:
    async with serving(ScriptedSystem(), keys=KeyRing([])) as server:
        assert (await call(server.port, "GET", "/v1/models", headers=bearer())).status == 401
        assert (await call(server.port, "GET", "/v1/models", headers=bearer(""))).status == 401


async def test_no_log_and_no_answer_shows_a_key(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    # the test's own client says what it sends
    logging.getLogger("websockets.client").setLevel(logging.WARNING)

    async def fail(_request: object) -> None:
        raise RuntimeError("broken")

    answers = [
        await call(server.port, "GET", path, headers=bearer(key))
        for path in ("/v1/models", "/v1/wings", "/metrics", "/v1/chunks?after=x")
        for key in (KEY, KEY + "x")
    ]
    server.system.submit = fail  # type: ignore[assignment, method-assign]
    answers.append(await call(server.port, "POST", "/v1/chat/completions", ASK, bearer()))
    for key in (KEY, KEY + "x"):
        await dial(server, "kvblend.v1.json", key=key)
        await dial(server, "kvblend.v1.json", subprotocol(key))
    shown = caplog.text + "".join(f"{answer.headers}{answer.body.decode()}" for answer in answers)
    assert answers[-1].status == 500
    for secret in (KEY, subprotocol(KEY)[len(BEARER_SUBPROTOCOL) :], ALICE.digest.hex(), ALICE.id):
        assert secret not in shown


async def test_refusals_show_in_the_metrics(server: Server) -> None:
    await call(server.port, "GET", "/v1/models")
    text = (await call(server.port, "GET", "/metrics", headers=bearer(WATCH_KEY))).body.decode()
    assert 'kvblend:request_failure_total{code="unauthorized"} 1.0' in text


async def test_a_request_too_many_is_429_with_a_time_to_come_back() -> None:
    async with serving(ScriptedSystem(), rates=RateLimits(2)) as server:
        statuses = [(await call(server.port, "GET", "/v1/models")).status for _ in range(2)]
        refused = await call(server.port, "POST", "/v1/chat/completions", ASK)
        handshake = await dial(server, "kvblend.v1.json")
        spared = [(await call(server.port, "GET", path)).status for path in ("/health", "/ready", "/metrics")]
    assert (statuses, handshake, spared) == ([200, 200], "429", [200, 200, 200])
    assert (refused.status, refused.error["code"], server.system.requests) == (429, "rate_limited", [])
    assert 1 <= int(refused.headers["retry-after"]) <= 30


def test_a_route_that_is_not_behind_the_guard_is_noticed() -> None:
    with pytest.raises(TypeError, match="not behind the guard"):
        caller_of({"kvblend.caller": None})


async def test_figures_of_all_tenants_are_for_operators(server: Server) -> None:
    server.system.readiness = Ready(details={"disk_bytes": 5})
    answers = [await call(server.port, "GET", "/metrics", headers=bearer(key)) for key in (KEY, WATCH_KEY)]
    states = [(await call(server.port, "GET", "/ready", headers=bearer(key))).json for key in (KEY, WATCH_KEY)]
    assert [answer.status for answer in answers] == [403, 200]
    assert (answers[0].error["code"], b"kvblend:" in answers[0].body) == ("forbidden", False)
    assert [state["details"] for state in states] == [{}, {"disk_bytes": 5}]
    assert states[0]["ready"] is True


async def test_an_operator_asks_as_a_tenant_of_its_own(server: Server) -> None:
    assert (await call(server.port, "POST", "/v1/chat/completions", ASK, bearer(WATCH_KEY))).status == 200
    assert server.system.requests[0].tenant == WATCH.id
