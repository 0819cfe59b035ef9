from __future__ import annotations

import asyncio

import pytest
from raw_http import call
from starlette.types import Message, Scope
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin, Subprotocol

from kvblend.api.client.http import get_json
from kvblend.api.server.app import create_app
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import Ready, ScriptedSystem, Server, serving


async def refusal(server: Server, subprotocol: str = "kvblend.v1.msgpack", origin: str | None = None) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(
            f"{server.url}/v1/responses",
            subprotocols=[Subprotocol(subprotocol)],
            origin=None if origin is None else Origin(origin),
            proxy=None,
        ):
            pass
    return caught.value


async def test_health_is_200_even_when_not_ready() -> None:
    system = ScriptedSystem()
    system.readiness = Ready(False, ("no model",))
    async with serving(system) as server:
        assert await get_json(server.url, "/health", 10) == (200, {"status": "ok"})


async def test_ready_tells_model_and_details() -> None:
    system = ScriptedSystem()
    system.readiness = Ready(details={"chunks": 3})
    async with serving(system) as server:
        status, body = await get_json(server.url, "/ready", 10)
    assert (status, body) == (200, {"ready": True, "reasons": [], "model": "scripted", "details": {"chunks": 3}})


async def test_not_ready_is_503_with_the_reasons() -> None:
    system = ScriptedSystem()
    system.readiness = Ready(False, ("the store is not open",))
    async with serving(system) as server:
        status, body = await get_json(server.url, "/ready", 10)
    assert (status, body["reasons"]) == (503, ["the store is not open"])


async def test_a_server_that_answers_in_a_worse_way_is_ready_and_says_why() -> None:
    system = ScriptedSystem()
    system.readiness = Ready(True, ("gate failed: kl_mean",))
    async with serving(system) as server:
        status, body = await get_json(server.url, "/ready", 10)
    assert (status, body["ready"], body["reasons"]) == (200, True, ["gate failed: kl_mean"])


async def test_unknown_subprotocols_are_refused_before_the_handshake() -> None:
    async with serving(ScriptedSystem()) as server:
        response = (await refusal(server, "other.v9")).response
    assert response.status_code == 400
    assert b"kvblend.v1.msgpack" in response.body


async def test_a_known_subprotocol_behind_an_unknown_one_is_taken() -> None:
    names = [Subprotocol("other.v9"), Subprotocol("kvblend.v1.json")]
    async with (
        serving(ScriptedSystem()) as server,
        connect(f"{server.url}/v1/responses", subprotocols=names, proxy=None) as socket,
    ):
        assert socket.subprotocol == "kvblend.v1.json"


async def test_a_foreign_origin_is_refused() -> None:
    async with serving(ScriptedSystem(), origins=("https://good.example",)) as server:
        assert (await refusal(server, origin="https://bad.example")).response.status_code == 403


async def test_a_listed_origin_is_taken() -> None:
    async with (
        serving(ScriptedSystem(), origins=("https://good.example",)) as server,
        server.peer(origin="https://good.example") as peer,
    ):
        await peer.create()
        await peer.finish()


async def test_one_connection_too_many_is_503_with_retry_after() -> None:
    async with serving(ScriptedSystem(), ApiLimits(connections_max=1)) as server, server.peer() as peer:
        await peer.create()
        await peer.finish()
        response = (await refusal(server)).response
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")


async def test_a_draining_server_refuses_new_connections_with_503() -> None:
    release = asyncio.Event()
    system = ScriptedSystem()

    async def drain(grace_s: float) -> None:
        await release.wait()

    system.drain = drain  # type: ignore[method-assign]
    async with serving(system) as server:
        server.stop.set()
        while (await get_json(server.url, "/ready", 10))[0] != 503:
            pass
        status = (await refusal(server)).response.status_code
        release.set()
    assert status == 503


async def asked_from(system: ScriptedSystem, peers: list[tuple[str, int] | None]) -> list[str]:
    """Who the system takes for the clients of requests that come from these addresses."""
    app = create_app(system)
    for peer in peers:
        body = b'{"messages": [{"role": "user", "content": "q"}]}'
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "client": peer,
        }
        scope["headers"] = [(b"content-type", b"application/json"), (b"host", b"here")]
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answer: list[Message] = []

        async def receive(left: list[Message] = messages) -> Message:
            return left.pop() if left else await asyncio.Future[Message]()

        async def send(message: Message, into: list[Message] = answer) -> None:
            into.append(message)

        await app(scope, receive, send)
        assert answer[0]["status"] == 200
    await system.close()
    return [request.client for request in system.requests]


async def test_without_keys_an_address_is_a_client_whatever_its_port() -> None:
    clients = await asked_from(ScriptedSystem(), [("10.0.0.1", 5001), ("10.0.0.1", 5002), ("10.0.0.2", 5001), None])
    assert clients == ["http-10.0.0.1", "http-10.0.0.1", "http-10.0.0.2", ""]


async def test_a_proxy_on_this_machine_is_believed_where_a_request_comes_from() -> None:
    system, ask = ScriptedSystem(), {"messages": [{"role": "user", "content": "q"}]}
    async with serving(system) as server:
        for headers in ({}, {"X-Forwarded-For": "10.0.0.7"}):
            answer = await call(server.port, "POST", "/v1/chat/completions", ask, headers)
            assert answer.status == 200
    assert [request.client for request in system.requests] == ["http-127.0.0.1", "http-10.0.0.7"]
