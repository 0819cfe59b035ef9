"""`previous_response_id`: a conversation gone on from a response that is kept, over HTTP and WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from model_files import save_llama
from raw_http import RawAnswer, call
from small_system import TEXTS, running, serving_any

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import ChatMessage, Delta, Document, Finished, Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.client import AsyncClient
from kvblend.api.server.keys import KeyRing, issue
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import USAGE, ScriptedSystem, Server, hold, serving

PATH = "/v1/responses"
UNKNOWN = "previous_response_not_found"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


async def ask(port: int, headers: dict[str, str] | None = None, **fields: Any) -> RawAnswer:
    return await call(port, "POST", PATH, {"input": "what?", **fields}, headers)


async def test_the_prompt_repeats_the_earlier_one_with_its_answer(server: Server) -> None:
    first = (await ask(server.port, instructions="s", documents=[{"title": "t", "text": "x"}])).json
    second = (await ask(server.port, input="and then?", previous_response_id=first["id"])).json
    assert second["previous_response_id"] == first["id"]
    asked = server.system.requests[1]
    assert asked.messages == (
        ChatMessage("user", "what?"),
        ChatMessage("assistant", "one two three"),
        ChatMessage("user", "and then?"),
    )
    assert (asked.system, asked.documents) == ("s", (Document("x", "t"),))


async def test_new_instructions_and_documents_are_taken(server: Server) -> None:
    name = (await ask(server.port, instructions="s", documents=[{"text": "x"}])).json["id"]
    await ask(server.port, instructions="new", documents=[{"text": "y"}], previous_response_id=name)
    asked = server.system.requests[1]
    assert (asked.system, asked.documents) == ("new", (Document("x"), Document("y")))


async def test_parts_of_a_later_message_are_no_documents(server: Server) -> None:
    name = (await ask(server.port)).json["id"]
    parts = [{"type": "input_text", "text": text} for text in ("a", "b")]
    await ask(server.port, input=[{"role": "user", "content": parts}], previous_response_id=name)
    asked = server.system.requests[1]
    assert (asked.documents, asked.messages[-1].content) == ((), "a\n\nb")


async def test_a_websocket_goes_on_from_either_wire(server: Server) -> None:
    name = (await ask(server.port)).json["id"]
    async with server.peer() as peer:
        for count in (3, 5):
            await peer.create(previous_response_id=name)
            name = (await peer.finish())[-1]["response"]["id"]
            assert len(server.system.requests[-1].messages) == count
    over_http = (await call(server.port, "GET", f"{PATH}/{name}")).json
    assert (over_http["status"], over_http["error"]) == ("completed", None)


@pytest.mark.parametrize("extra", [{}, {"store": False}])
async def test_an_unknown_response_is_refused_over_both_wires(server: Server, extra: dict[str, Any]) -> None:
    name = (await ask(server.port, **extra)).json["id"] if extra else "resp_x"
    refused = await ask(server.port, previous_response_id=name)
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert (refused.error["code"], refused.error["param"]) == (UNKNOWN, "previous_response_id")
    async with server.peer() as peer:
        await peer.create(previous_response_id=name)
        error = await peer.error()
        await peer.create(store=False)
        mine = (await peer.finish())[-1]["response"]["id"]
        await peer.create(previous_response_id=mine)
        again = await peer.error()
    assert (error["status"], error["code"], again["code"]) == (400, UNKNOWN, UNKNOWN)


async def test_one_that_runs_cannot_be_gone_on_from() -> None:
    async with serving(ScriptedSystem(hold)) as server:
        name = (await ask(server.port, background=True)).json["id"]
        assert (await ask(server.port, previous_response_id=name)).error["code"] == UNKNOWN


async def test_anothers_response_is_as_unknown_as_one_that_never_was() -> None:
    (alice, alice_key), (bob, bob_key) = issue("alice"), issue("bob")
    async with serving(ScriptedSystem(), keys=KeyRing([alice, bob])) as server:
        name = (await ask(server.port, {"Authorization": f"Bearer {alice_key}"})).json["id"]
        foreign = await ask(server.port, {"Authorization": f"Bearer {bob_key}"}, previous_response_id=name)
        never = await ask(server.port, {"Authorization": f"Bearer {bob_key}"}, previous_response_id="resp_x")
    assert foreign.error["message"].replace(name, "resp_x") == never.error["message"]


async def test_a_conversation_ends_at_the_limit_of_messages() -> None:
    async with serving(ScriptedSystem(), ApiLimits(messages_max=2, drain_grace_s=0)) as server:
        name = (await ask(server.port)).json["id"]
        refused = await ask(server.port, previous_response_id=name)
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")


async def test_storing_goes_on_from_nothing(server: Server) -> None:
    name = (await ask(server.port)).json["id"]
    refused = await ask(server.port, generate=False, documents=[{"text": "x"}], previous_response_id=name)
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")


@pytest.mark.parametrize(
    ("param", "theirs"),
    [
        ("documents[0].id", "previous_response_id"),
        ("documents[1].id", "documents[0].id"),
        ("messages[0].content", "previous_response_id"),
        ("messages[2].content", "input"),
    ],
)
async def test_an_error_names_the_field_of_this_request(server: Server, param: str, theirs: str) -> None:
    name = (await ask(server.port, documents=[{"text": "x"}])).json["id"]
    server.system.refusal = RequestError("invalid_request", f"{param} is wrong", param)
    refused = await ask(server.port, documents=[{"text": "y"}], previous_response_id=name)
    assert refused.error["param"].removesuffix(".content") == theirs


async def test_an_answer_cut_by_its_length_can_be_gone_on_from() -> None:
    async def cut(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Delta(request.request_id, "half", (0,)))
        stream.push_nowait(Finished(request.request_id, "length", USAGE))

    async with serving(ScriptedSystem(cut)) as server:
        name = (await ask(server.port)).json["id"]
        assert (await ask(server.port, previous_response_id=name)).status == 200


async def test_the_chunks_of_the_first_turn_are_found_in_the_second(tmp_path: Any) -> None:
    model = save_llama(tmp_path / "tiny", num_hidden_layers=4, max_position_embeddings=2048)
    async with (
        running(model, store=tmp_path / "kv") as system,
        serving_any(system) as port,
        AsyncClient(f"ws://127.0.0.1:{port}") as client,
    ):
        first = client.generate("who held the key?", documents=TEXTS, max_tokens=4)
        answer = await first.text()
        await system.settle()
        second = client.generate("and why?", previous_response_id=first.response_id, max_tokens=4)
        await second.text()
        usage = second.result.usage
    assert answer
    assert (first.result.usage.chunk_hits, usage.chunk_hits, usage.chunk_misses) == (0, len(TEXTS), 0)
    assert usage.tokens_reused > 0.5 * usage.prompt_tokens
    assert usage.prompt_tokens > first.result.usage.prompt_tokens
