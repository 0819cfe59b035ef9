"""`/v1/responses` over HTTP: whole, as events, in the background, by id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_http import RawAnswer, call, request_bytes

from kvblend.actors.messages import Delta, Failed, Finished, Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import USAGE, ScriptedSystem, Server, hold, serving

PATH = "/v1/responses"
KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


async def create(server: Server, **fields: Any) -> RawAnswer:
    return await call(server.port, "POST", PATH, {"input": "what?", **fields})


async def get(server: Server, name: str) -> RawAnswer:
    return await call(server.port, "GET", f"{PATH}/{name}")


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_a_response_in_one_piece(server: Server) -> None:
    response = (await create(server, metadata={"a": "b"}, instructions="s", temperature=0.5)).json
    assert (response["object"], response["status"], text_of(response)) == ("response", "completed", "one two three")
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 60
    assert (response["metadata"], response["instructions"], response["temperature"]) == ({"a": "b"}, "s", 0.5)
    assert (response["error"], response["tools"]) == (None, [])


async def test_a_stream_has_the_events_of_the_responses_api_in_order(server: Server) -> None:
    answer = await create(server, stream=True)
    events = answer.frames
    kinds = [event["type"] for event in events]
    assert [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind] == KINDS
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if "delta" in event) == "one two three"
    names = [line[7:] for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    assert names == kinds


async def test_a_response_is_kept_and_can_be_forgotten(server: Server) -> None:
    response = (await create(server)).json
    assert (await get(server, response["id"])).json == response
    assert (await call(server.port, "DELETE", f"{PATH}/{response['id']}")).json["deleted"] is True
    assert (await get(server, response["id"])).status == 404


async def test_a_response_that_is_not_to_be_stored_is_not_kept(server: Server) -> None:
    response = (await create(server, store=False)).json
    assert (await get(server, response["id"])).status == 404


async def test_a_streamed_response_is_kept_too(server: Server) -> None:
    last = (await create(server, stream=True)).frames[-1]["response"]
    assert text_of((await get(server, last["id"])).json) == "one two three"


async def test_a_response_in_the_background_is_asked_for_later(server: Server) -> None:
    response = (await create(server, background=True)).json
    assert (response["status"], response["background"]) == ("in_progress", True)
    async with asyncio.timeout(20):
        while (now := (await get(server, response["id"])).json)["status"] == "in_progress":
            pass
    assert (now["status"], text_of(now)) == ("completed", "one two three")


async def test_one_in_the_background_can_be_cancelled() -> None:
    async with serving(ScriptedSystem(hold)) as server:
        name = (await create(server, background=True)).json["id"]
        ended = (await call(server.port, "POST", f"{PATH}/{name}/cancel")).json
        assert (ended["status"], ended["incomplete_details"]["reason"]) == ("cancelled", "cancelled")
        again = await call(server.port, "POST", f"{PATH}/{name}/cancel")
        assert (again.status, again.error["code"]) == (400, "invalid_request")
        assert (await get(server, name)).json["status"] == "cancelled"


async def test_cancelling_ends_a_stream_with_its_terminal_event() -> None:
    system = ScriptedSystem(hold)
    async with serving(system) as server:
        asking = asyncio.create_task(create(server, stream=True))
        await system.until(lambda: system.running == 1)
        await call(server.port, "POST", f"{PATH}/{system.requests[0].request_id}/cancel")
        assert (await asking).frames[-1]["type"] == "response.incomplete"


async def test_a_reader_that_goes_away_cancels_its_response() -> None:
    system = ScriptedSystem(hold)
    async with serving(system) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = b'{"input":"q","stream":true}'
        head = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        writer.write(request_bytes("POST", PATH, body, head))
        await system.until(lambda: system.running == 1)
        name = system.requests[0].request_id
        writer.close()
        await system.until(lambda: system.abandoned == [name])
        assert (await get(server, name)).json["status"] == "cancelled"


async def test_an_unknown_response_is_not_found(server: Server) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        answer = await call(server.port, method, f"{PATH}/resp_x{path}")
        assert (answer.status, answer.error["param"]) == (404, "response_id")


async def test_a_failure_has_its_status_and_is_kept() -> None:
    async def fail(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Delta(request.request_id, "one"))
        stream.push_nowait(Failed(request.request_id, "internal", "broken"))

    system = ScriptedSystem(fail)
    async with serving(system) as server:
        answer = await create(server)
        kept = (await get(server, system.requests[0].request_id)).json
    assert (answer.status, answer.error["message"]) == (500, "broken")
    assert (kept["status"], kept["error"]["message"]) == ("failed", "broken")


async def test_a_cut_response_is_incomplete() -> None:
    async def cut(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Finished(request.request_id, "length", USAGE))

    async with serving(ScriptedSystem(cut)) as server:
        response = (await create(server)).json
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_response_that_the_server_ends_is_no_answer() -> None:
    system = ScriptedSystem(hold)
    async with serving(system) as server:
        asking = asyncio.create_task(create(server))
        await system.until(lambda: system.running == 1)
        server.stop.set()
        assert (await asking).status == 503


async def test_the_oldest_are_forgotten() -> None:
    limits = ApiLimits(kept_responses_max=2, drain_grace_s=0, close_grace_s=1)
    async with serving(ScriptedSystem(), limits) as server:
        names = [(await create(server)).json["id"] for _ in range(3)]
        assert [(await get(server, name)).status for name in names] == [404, 200, 200]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"stream_id": "a"}, "stream_id"),
    ],
)
async def test_a_bad_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = await create(server, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.system.requests == []
