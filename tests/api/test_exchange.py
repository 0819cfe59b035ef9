"""What no body may do: every refusal is in OpenAI's shape, and the server lives on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_http import call, parse_answer, request_bytes

from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.exchange import ClientGone, run_while_connected
from tests.api.scripted import ScriptedSystem, Server, serving

CHAT = "/v1/chat/completions"
POSTS = (CHAT, "/v1/completions", "/v1/responses", "/v1/chunks")
GOOD = {"messages": [{"role": "user", "content": "q"}]}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(
        ScriptedSystem(), ApiLimits(message_bytes_max=2000, drain_grace_s=0, close_grace_s=1)
    ) as running:
        yield running


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
async def test_another_content_type_is_415(server: Server, path: str, kind: str) -> None:
    answer = await call(server.port, "POST", path, GOOD, {"Content-Type": kind})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_a_content_type_may_name_its_charset(server: Server) -> None:
    assert (
        await call(server.port, "POST", CHAT, GOOD, {"Content-Type": "Application/JSON; charset=utf-8"})
    ).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe{}",
        b'{"messages": "\xe4"}',
        b"[" * 1500,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"temperature": NaN}',
        b'{"max_tokens": ' + b"9" * 1500 + b"}",
        b'{"temperature": 1e999, "messages": []}',
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
async def test_a_body_that_is_no_good_json_is_400(server: Server, body: bytes) -> None:
    for path in POSTS:
        answer = await call(server.port, "POST", path, body)
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        assert "frame" not in answer.error["message"]


@pytest.mark.parametrize("path", POSTS)
async def test_an_unknown_field_is_named(server: Server, path: str) -> None:
    answer = await call(server.port, "POST", path, {"messages": [], "wings": 2})
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert answer.error["param"] in ("wings", "messages")


async def test_a_body_that_is_too_large_is_413(server: Server) -> None:
    assert (await call(server.port, "POST", CHAT, b" " * 2001)).status == 413


async def test_a_body_that_lies_about_its_length_is_refused_unread(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = {"Content-Type": "application/json", "Content-Length": "9" * 30}
    writer.write(request_bytes("POST", CHAT, b"{}", head))
    async with asyncio.timeout(20):
        answer = parse_answer(await reader.read(-1))
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


async def test_a_chunked_body_that_never_says_its_length_is_bounded(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = b"POST %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head % CHAT.encode() + b"3e8\r\n" + b" " * 1000 + b"\r\n" + b"3e9\r\n" + b" " * 1001 + b"\r\n")
    async with asyncio.timeout(20):
        assert b" 413 " in await reader.readline()
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_body_that_does_not_come_is_given_up() -> None:
    async with serving(ScriptedSystem(), ApiLimits(body_s=0.05, drain_grace_s=0, close_grace_s=1)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes("POST", CHAT, b"{", {"Content-Type": "application/json", "Content-Length": "9"}))
        async with asyncio.timeout(20):
            assert b" 400 " in await reader.readline()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_no_such_route_and_no_such_method_have_the_same_shape(server: Server) -> None:
    missing = await call(server.port, "GET", "/v1/wings")
    wrong = await call(server.port, "GET", CHAT)
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")


async def test_waiting_ends_when_the_client_does() -> None:
    gone = asyncio.Event()
    stopped = asyncio.Event()

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            gone.set()
            await asyncio.Event().wait()
        finally:
            stopped.set()

    with pytest.raises(ClientGone):
        await run_while_connected(receive, work())
    assert stopped.is_set()


async def test_work_that_fails_fails_for_its_caller() -> None:
    async def work() -> None:
        raise KeyError("x")

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(KeyError):
        await run_while_connected(receive, work())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ("model", "messages", "prompt", "input", "documents", "stop", "max_tokens", "stream", "blend", "seed", "metadata")
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "system", "tool")) | JSON, "content": st.text(max_size=5) | JSON}
)
BODY = st.dictionaries(NAMES, JSON | st.lists(MESSAGE, max_size=3) | st.sampled_from(("scripted", "q")), max_size=6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(POSTS), BODY | JSON | st.binary(max_size=40)), min_size=1, max_size=5))
def test_no_body_gives_a_5xx_or_ends_the_server(bodies: list[tuple[str, object]]) -> None:
    async def send_all() -> None:
        async with serving(ScriptedSystem()) as server:
            for path, body in bodies:
                data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
                answer = await call(server.port, "POST", path, data)
                assert answer.status < 500, (path, body, answer.body)
                if answer.status != 200:
                    assert {"message", "type", "param", "code"} <= answer.error.keys()
            assert (await call(server.port, "GET", "/health")).status == 200

    asyncio.run(send_all())
