from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from raw_http import call

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import ChatMessage, Generate
from kvblend.api.server.keys import KeyRing, issue
from kvblend.api.server.rates import RateLimits
from kvblend.api.server.tenants import Callers, TenantSystem
from tests.api.scripted import ScriptedSystem, hold, serving

(ALICE, ALICE_KEY), (BOB, BOB_KEY) = issue("alice"), issue("bob")
ASK = {"messages": [{"role": "user", "content": "q"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def system_of(system: ScriptedSystem, rates: RateLimits, *, counted: bool = True) -> TenantSystem:
    callers = Callers(KeyRing([ALICE]), rates, lambda: 0.0)
    return TenantSystem(system, callers.find(ALICE_KEY), counted=counted)


def request(name: str) -> Generate:
    return Generate(name, (ChatMessage("user", "q"),))


@pytest.mark.parametrize("token", [None, "", "kvb_wrong"])
def test_a_key_that_is_nobodys_is_refused(token: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        Callers(KeyRing([ALICE]), RateLimits()).find(token)
    assert caught.value.code == "unauthorized"


def test_a_new_key_of_a_tenant_goes_on_where_the_old_one_was() -> None:
    ring = KeyRing([ALICE])
    callers = Callers(ring, RateLimits(1), lambda: 0.0)
    callers.find(ALICE_KEY).allowance.count()
    rotated, key = issue("alice", ALICE.id)
    ring.replace([rotated])
    with pytest.raises(RequestError, match="requests per minute"):
        callers.find(key).allowance.count()


async def test_a_request_carries_its_tenant() -> None:
    system = ScriptedSystem()
    await (await system_of(system, RateLimits()).submit(request("r1"))).drain()
    assert [one.tenant for one in system.requests] == [ALICE.id]
    await system.close()


async def test_who_asks_is_the_peer_unless_the_request_says_more() -> None:
    system = ScriptedSystem()
    own = TenantSystem(system, Callers(None, RateLimits()).find(None), counted=True, peer="http-10.0.0.1")
    for asked in (request("r1"), replace(request("r2"), client="ws-1")):
        (await own.submit(asked)).abandon()
    assert [one.client for one in system.requests] == ["http-10.0.0.1", "ws-1"]
    await system.close()


async def test_places_are_given_back_by_an_end_an_abandon_and_a_refusal() -> None:
    system = ScriptedSystem()
    own = system_of(system, RateLimits(0, 1))
    stream = await own.submit(request("r1"))
    while await stream.drain():
        pass
    stream.abandon()
    system.script = hold
    held = await own.submit(request("r2"))
    with pytest.raises(RequestError, match="1 requests run at once"):
        await own.submit(request("r3"))
    held.abandon()
    system.refusal = RequestError("overloaded", "full")
    with pytest.raises(RequestError, match="full"):
        await own.submit(request("r4"))
    system.refusal = None
    (await own.submit(request("r5"))).abandon()
    await system.close()


async def test_over_http_an_exchange_counts_once() -> None:
    system = ScriptedSystem()
    own = system_of(system, RateLimits(1), counted=False)
    for name in ("r1", "r2"):
        (await own.submit(request(name))).abandon()
    await system.close()


async def test_over_a_websocket_a_request_too_many_gets_the_error_event() -> None:
    # the handshake is the first
    async with keyed(rates=RateLimits(2)) as server, server.peer(additional_headers=bearer(ALICE_KEY)) as peer:
        await peer.create()
        await peer.finish()
        await peer.create(event_id="second")
        event = await peer.receive()
    assert (event["type"], event["status"], event["event_id"]) == ("error", 429, "second")
    assert event["error"]["code"] == "rate_limited"
    assert event["error"]["retry_after_s"] > 0


async def test_over_a_websocket_no_more_than_the_limit_run_at_once() -> None:
    async with keyed(hold, RateLimits(0, 1)) as server, server.peer(additional_headers=bearer(ALICE_KEY)) as peer:
        await peer.create(stream_id="a")
        await peer.until("response.output_text.delta")
        await peer.create(stream_id="b")
        assert (await peer.error())["code"] == "rate_limited"


async def test_one_keys_limit_is_not_anothers() -> None:
    async with keyed(rates=RateLimits(1)) as server:
        statuses = [
            (await call(server.port, "GET", "/v1/models", headers=bearer(key))).status
            for key in (ALICE_KEY, ALICE_KEY, BOB_KEY)
        ]
    assert statuses == [200, 429, 200]


async def test_an_open_connection_of_a_withdrawn_key_gets_no_answers() -> None:
    ring = KeyRing([ALICE, BOB])
    async with keyed(ring=ring) as server, server.peer(additional_headers=bearer(ALICE_KEY)) as peer:
        await peer.create()
        await peer.finish()
        ring.replace([BOB])
        await peer.create()
        assert (await peer.error())["code"] == "unauthorized"


async def test_responses_are_their_senders_own() -> None:
    async with keyed(hold) as server:
        made = await call(server.port, "POST", "/v1/responses", {"input": "q", "background": True}, bearer(ALICE_KEY))
        name = made.json["id"]
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            answer = await call(server.port, method, f"/v1/responses/{name}{path}", headers=bearer(BOB_KEY))
            assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert server.system.cancelled == []
        own = await call(server.port, "POST", f"/v1/responses/{name}/cancel", headers=bearer(ALICE_KEY))
        assert (own.status, own.json["status"]) == (200, "cancelled")


async def test_a_response_is_kept_when_its_tenant_gets_a_new_key() -> None:
    ring = KeyRing([ALICE])
    async with keyed(ring=ring) as server:
        made = await call(server.port, "POST", "/v1/responses", {"input": "q"}, bearer(ALICE_KEY))
        rotated, key = issue("alice", ALICE.id)
        ring.replace([rotated])
        assert (await call(server.port, "GET", f"/v1/responses/{made.json['id']}", headers=bearer(key))).status == 200


async def test_a_cancel_over_a_websocket_ends_nobody_elses_response() -> None:
    async with (
        keyed(hold) as server,
        server.peer(additional_headers=bearer(ALICE_KEY)) as alice,
        server.peer(additional_headers=bearer(BOB_KEY)) as bob,
    ):
        await alice.create()
        name = (await alice.until("response.output_text.delta"))[0]["response"]["id"]
        await bob.send({"type": "response.cancel", "response_id": name})
        assert (await bob.error())["code"] == "not_found"
        assert server.system.cancelled == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ASK),
        ("/v1/completions", {"prompt": "q"}),
        ("/v1/responses", {"input": "q"}),
        ("/v1/chunks", {"documents": [{"text": "t"}]}),
    ],
)
@pytest.mark.parametrize("name", ["tenant", "salt"])
async def test_no_field_of_a_body_says_whose_chunks_are_meant(path: str, body: dict[str, Any], name: str) -> None:
    async with keyed() as server:
        for sent in ({**body, name: BOB.id}, {**body, "documents": [{"text": "t", name: BOB.id}]}):
            assert (await call(server.port, "POST", path, sent, bearer(ALICE_KEY))).status == 400
        assert (await call(server.port, "POST", path, body, bearer(ALICE_KEY))).status == 200
    assert [one.tenant for one in server.system.requests] == [ALICE.id]


@pytest.mark.parametrize("fields", [{"tenant": BOB.id}, {"salt": BOB.id}, {"blend": {"salt": BOB.id}}])
async def test_no_field_of_a_frame_says_whose_chunks_are_meant(fields: dict[str, Any]) -> None:
    async with keyed() as server, server.peer(additional_headers=bearer(ALICE_KEY)) as peer:
        await peer.create(**fields)
        assert (await peer.error())["status"] == 400


def keyed(script: Any = None, rates: RateLimits | None = None, ring: KeyRing | None = None) -> Any:
    system = ScriptedSystem() if script is None else ScriptedSystem(script)
    return serving(system, keys=ring or KeyRing([ALICE, BOB]), rates=rates)
