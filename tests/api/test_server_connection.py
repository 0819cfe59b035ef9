from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import WORDS, ScriptedSystem, Server, hold, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


async def test_events_come_in_the_order_of_the_protocol(server: Server) -> None:
    async with server.peer() as peer:
        await peer.create()
        kinds = [frame["type"] for frame in await peer.finish()]
    assert [k for k in kinds if k != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.kv",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_sequence_numbers_rise_by_one_from_zero(server: Server) -> None:
    async with server.peer() as peer:
        await peer.create()
        frames = await peer.finish()
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))


async def test_deltas_joined_are_the_text_of_the_output(server: Server) -> None:
    async with server.peer() as peer:
        await peer.create()
        frames = await peer.finish()
    deltas = "".join(f["delta"] for f in frames if f["type"] == "response.output_text.delta")
    assert deltas == "".join(WORDS) == frames[-1]["response"]["output"][0]["content"][0]["text"]


async def test_an_ingest_reports_progress_and_chunks(server: Server) -> None:
    async with server.peer() as peer:
        frame = {"type": "response.create", "generate": False, "documents": [{"text": "a b"}, {"text": "c"}]}
        await peer.send(frame)
        frames = await peer.finish()
    progress = [f for f in frames if f["type"] == "response.ingest.progress"]
    assert (progress[-1]["done"], progress[-1]["total"]) == (2, 2)
    assert {f["type"] for f in frames} == {"response.created", "response.ingest.progress", "response.completed"}
    assert frames[-1]["response"]["chunks"][0] == {"id": "chunk-0", "tokens": 2, "created": True, "conditioning": ""}


async def test_requests_of_one_stream_id_run_one_after_the_other(server: Server) -> None:
    async with server.peer() as peer:
        for _ in range(3):
            await peer.create(stream_id="a")
        frames = [frame for _ in range(3) for frame in await peer.finish()]
    ids = [frame["response_id"] for frame in frames]
    assert ids == sorted(ids, key=[r.request_id for r in server.system.requests].index)


async def test_the_requests_of_a_connection_are_those_of_one_client(server: Server) -> None:
    for _ in range(2):
        async with server.peer() as peer:
            for _ in range(2):
                await peer.create()
                await peer.finish()
    first, second, other, last = [request.client for request in server.system.requests]
    assert first == second != other == last


async def test_different_stream_ids_run_at_the_same_time(server: Server) -> None:
    server.system.script = hold
    async with server.peer() as peer:
        for name in ("a", "b", "c"):
            await peer.create(stream_id=name)
        await server.system.until(lambda: server.system.running == 3)


async def test_cancel_by_response_id_ends_it_as_incomplete(server: Server) -> None:
    server.system.script = hold
    async with server.peer() as peer:
        await peer.create()
        created = (await peer.until("response.output_text.delta"))[0]
        await peer.send({"type": "response.cancel", "response_id": created["response_id"]})
        end = (await peer.finish())[-1]
    assert end["type"] == "response.incomplete"
    assert end["response"]["incomplete_details"] == {"reason": "cancelled", "detail": "cancelled by the client"}


async def test_cancel_by_stream_id_ends_what_runs_and_what_waits(server: Server) -> None:
    server.system.script = hold
    async with server.peer() as peer:
        await peer.create(stream_id="a")
        await peer.create(stream_id="a")
        await peer.until("response.output_text.delta")
        await peer.send({"type": "response.cancel", "stream_id": "a"})
        ends = [(await peer.finish())[-1] for _ in range(2)]
    assert [end["type"] for end in ends] == ["response.incomplete"] * 2
    assert len(server.system.requests) == 1


async def test_cancelling_nothing_is_not_found(server: Server) -> None:
    async with server.peer() as peer:
        await peer.send({"type": "response.cancel", "response_id": "resp_x", "event_id": "e1"})
        frame = await peer.receive()
    assert (frame["type"], frame["status"], frame["event_id"]) == ("error", 404, "e1")


async def test_one_lane_too_many_is_rate_limited() -> None:
    limits = ApiLimits(lanes_max=2, drain_grace_s=0.0)
    async with serving(ScriptedSystem(hold), limits) as server, server.peer() as peer:
        for name in ("a", "b"):
            await peer.create(stream_id=name)
        await server.system.until(lambda: server.system.running == 2)
        await peer.create(stream_id="c")
        error = (await peer.until("error"))[-1]
    assert (error["status"], error["error"]["code"], error["stream_id"]) == (429, "rate_limited", "c")


async def test_a_full_lane_is_rate_limited() -> None:
    limits = ApiLimits(lane_requests_max=1, drain_grace_s=0.0)
    async with serving(ScriptedSystem(hold), limits) as server, server.peer() as peer:
        for _ in range(3):
            await peer.create(stream_id="a")
        error = (await peer.until("error"))[-1]
    assert error["status"] == 429
    assert "limit is 1" in error["error"]["message"]


async def test_a_flood_of_lanes_runs_no_more_than_the_limit(server: Server) -> None:
    server.system.script = hold
    async with server.peer() as peer:
        for index in range(200):
            await peer.create(stream_id=f"s{index}")
        errors = 0
        while errors < 200 - 16:
            errors += (await peer.receive())["type"] == "error"
    assert len(server.system.requests) == 16


async def test_a_refusal_of_the_system_is_an_error_without_response_id(server: Server) -> None:
    server.system.refusal = RequestError("not_found", "documents[0].id: no chunk is called x", "documents[0].id")
    async with server.peer() as peer:
        await peer.create(event_id="e7")
        frame = await peer.receive()
    assert (frame["type"], frame["status"], frame["event_id"]) == ("error", 404, "e7")
    assert frame["error"]["param"] == "documents[0].id"
    assert "response_id" not in frame


async def test_an_unexpected_fault_in_submit_is_internal_and_the_connection_stays(server: Server) -> None:
    server.system.refusal = ZeroDivisionError("secret")  # type: ignore[assignment]
    async with server.peer() as peer:
        await peer.create()
        error = await peer.error()
        server.system.refusal = None
        await peer.create()
        await peer.finish()
    assert (error["status"], "secret" in error["message"]) == (500, False)


async def test_a_failed_request_ends_with_response_failed(server: Server) -> None:
    async def fail(_request: Generate, _stream: TokenStream) -> None:
        raise RuntimeError("layer 3 broke")

    server.system.script = fail
    async with server.peer() as peer:
        await peer.create()
        end = (await peer.finish())[-1]
    assert end["type"] == "response.failed"
    assert end["response"]["error"]["message"] == "layer 3 broke"


async def test_json_carries_the_same_events(server: Server) -> None:
    async with server.peer("kvblend.v1.json") as peer:
        await peer.socket.send(json.dumps({"type": "response.create", "input": "what?"}))
        kinds: list[str] = []
        while not kinds or kinds[-1] != "response.completed":
            kinds.append(json.loads(await peer.socket.recv())["type"])
    assert "response.kv" in kinds


async def test_without_a_subprotocol_no_event_of_our_own_is_sent(server: Server) -> None:
    async with server.peer(None) as peer:
        await peer.socket.send(json.dumps({"type": "response.create", "input": "what?"}))
        frames: list[dict[str, Any]] = []
        while not frames or frames[-1]["type"] != "response.completed":
            frames.append(json.loads(await peer.socket.recv()))
    assert "response.kv" not in [frame["type"] for frame in frames]
    assert all("response_id" not in frame for frame in frames)
