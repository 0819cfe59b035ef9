"""`/v1/chat/completions`, `/v1/completions` and `/v1/models` over a scripted system."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from raw_http import RawAnswer, call, request_bytes

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Failed, Finished, Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import USAGE, ScriptedSystem, Server, hold, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASK: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "what?"}]}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


async def chat(server: Server, **fields: Any) -> RawAnswer:
    return await call(server.port, "POST", CHAT, {**ASK, **fields})


async def test_an_answer_has_the_shape_of_openais(server: Server) -> None:
    body = (await chat(server)).json
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "scripted", "chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"]["content"] == "one two three"
    assert (choice["index"], choice["message"]["role"], choice["finish_reason"]) == (0, "assistant", "stop")


async def test_usage_tells_what_was_reused_under_both_names(server: Server) -> None:
    body = (await chat(server)).json
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 3, 103)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 60
    assert (body["kvblend"]["tokens_recomputed"], body["kvblend"]["chunk_hits"]) == (10, 2)


async def test_a_stream_opens_says_ends_and_is_done_once(server: Server) -> None:
    answer = await chat(server, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = answer.frames
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "one two three"
    assert [choice["finish_reason"] for choice in choices].count("stop") == 1
    assert choices[-1]["finish_reason"] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


async def test_usage_of_a_stream_comes_last_when_asked_for(server: Server) -> None:
    answer = await chat(server, stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = answer.frames
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 100)


async def test_an_answer_cut_by_length_says_so() -> None:
    async def cut(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Delta(request.request_id, "one"))
        stream.push_nowait(Finished(request.request_id, "length", USAGE))

    async with serving(ScriptedSystem(cut)) as server:
        assert (await chat(server)).json["choices"][0]["finish_reason"] == "length"


async def test_several_prompts_are_as_many_choices(server: Server) -> None:
    body = (await call(server.port, "POST", TEXT, {"prompt": ["a", [1, 2, 3]]})).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert {choice["text"] for choice in body["choices"]} == {"one two three"}
    assert body["usage"]["prompt_tokens"] == 200
    assert [request.prompt for request in server.system.requests] == ["a", (1, 2, 3)]


async def test_streams_of_several_prompts_are_told_apart(server: Server) -> None:
    *chunks, done = (await call(server.port, "POST", TEXT, {"prompt": ["a", "b"], "stream": True})).frames
    assert done == "[DONE]"
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "one two three"
        assert [choice["finish_reason"] for choice in mine].count("stop") == 1


async def test_the_model_is_listed_and_found(server: Server) -> None:
    listed = (await call(server.port, "GET", "/v1/models")).json
    assert [model["id"] for model in listed["data"]] == ["scripted"]
    assert (await call(server.port, "GET", "/v1/models/scripted")).json["object"] == "model"
    assert (await call(server.port, "GET", "/v1/models/some/other")).status == 404


async def test_an_unknown_model_is_not_found(server: Server) -> None:
    answer = await chat(server, model="gpt-9")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "not_found", "model")


@pytest.mark.parametrize(("code", "status"), [("rate_limited", 429), ("overloaded", 503)])
async def test_a_busy_system_says_when_to_come_back(server: Server, code: str, status: int) -> None:
    server.system.refusal = RequestError(code, "busy", retry_after_s=2.5)
    answer = await chat(server, stream=True)
    assert (answer.status, answer.headers["retry-after"]) == (status, "3")


async def test_an_engines_refusal_names_the_field_as_the_sender_knows_it(server: Server) -> None:
    server.system.refusal = RequestError("invalid_request", "messages[0].content is blank", "messages[0].content")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    error = (await chat(server, messages=messages)).error
    assert (error["param"], error["message"]) == ("messages[1].content", "messages[1].content is blank")


async def test_the_refused_prompt_of_several_is_named(server: Server) -> None:
    server.system.refusal = RequestError("invalid_request", "prompt holds 99", "prompt")
    assert (await call(server.port, "POST", TEXT, {"prompt": ["a", "b"]})).error["param"] == "prompt[0]"


async def fail(request: Generate, stream: TokenStream) -> None:
    stream.push_nowait(Delta(request.request_id, "one"))
    stream.push_nowait(Failed(request.request_id, "deadline_exceeded", "too late", "deadline_ms"))


async def test_a_failure_has_its_status() -> None:
    async with serving(ScriptedSystem(fail)) as server:
        answer = await chat(server)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (504, "deadline_exceeded", "deadline_ms")


@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
async def test_a_failure_in_a_stream_is_a_frame_before_the_end(prompts: Any) -> None:
    async with serving(ScriptedSystem(fail)) as server:
        frames = (await call(server.port, "POST", TEXT, {"prompt": prompts, "stream": True})).frames
    assert frames[-2]["error"]["code"] == "deadline_exceeded"
    assert frames.count("[DONE]") == 1
    assert frames[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_gives_its_request_up(stream: bool) -> None:
    system = ScriptedSystem(hold)
    async with serving(system) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await send(
            writer, CHAT, b'{"messages":[{"role":"user","content":"q"}],"stream":%s}' % str(stream).lower().encode()
        )
        await system.until(lambda: system.running == 1)
        writer.close()
        await system.until(lambda: len(system.abandoned) == 1)


async def send(writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
    head = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    writer.write(request_bytes("POST", path, body, head))
    await writer.drain()


async def test_a_client_that_goes_away_while_its_request_is_refused_room_leaves_nothing() -> None:
    system = ScriptedSystem()
    entered, left = asyncio.Event(), asyncio.Event()

    async def submit(_request: Generate) -> TokenStream:
        entered.set()
        try:
            return await asyncio.Future()
        finally:
            left.set()

    system.submit = submit  # type: ignore[method-assign, assignment]
    async with serving(system) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await send(writer, CHAT, b'{"messages":[{"role":"user","content":"q"}]}')
        await entered.wait()
        writer.close()
        await left.wait()


async def test_a_draining_server_ends_its_streams_with_a_word() -> None:
    system = ScriptedSystem(hold)
    async with serving(system) as server:
        asking = asyncio.create_task(chat(server, stream=True))
        await system.until(lambda: system.running == 1)
        server.stop.set()
        frames = (await asking).frames
    assert frames[-2]["error"]["code"] == "overloaded"
    assert frames[-1] == "[DONE]"


async def test_too_many_at_once_are_sent_away() -> None:
    system = ScriptedSystem(hold)
    async with serving(system, ApiLimits(connections_max=1, drain_grace_s=0, close_grace_s=1)) as server:
        asking = asyncio.create_task(chat(server, stream=True))
        await system.until(lambda: system.running == 1)
        answer = await chat(server)
        system.cancel_nowait(system.requests[0].request_id)
        await asking
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_a_silent_answer_is_kept_alive() -> None:
    release = asyncio.Event()

    async def late(request: Generate, stream: TokenStream) -> None:
        await release.wait()
        stream.push_nowait(Finished(request.request_id, "stop", USAGE))

    async with serving(ScriptedSystem(late), ApiLimits(ping_s=0.01, drain_grace_s=0, close_grace_s=1)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await send(writer, CHAT, b'{"messages":[{"role":"user","content":"q"}],"stream":true}')
        async with asyncio.timeout(20):
            await reader.readuntil(b": still here\n\n")
        release.set()
        assert b"[DONE]" in await reader.read(-1)
        writer.close()
        await writer.wait_closed()


async def test_a_fault_in_the_system_is_an_error_of_its_own(server: Server) -> None:
    async def submit(_request: Generate) -> TokenStream:
        raise OSError("disk")

    broken: Callable[[Generate], Awaitable[TokenStream]] = submit
    server.system.submit = broken  # type: ignore[method-assign, assignment]
    answer = await chat(server)
    assert (answer.status, answer.error["code"]) == (500, "internal")
    assert "disk" not in answer.error["message"]
