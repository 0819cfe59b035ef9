from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Accepted, Delta, Finished, Generate, Planned
from kvblend.actors.streams import TokenStream
from kvblend.api.client import (
    AsyncClient,
    ConnectionLost,
    GenerationFailed,
    RequestRefused,
    ResponseTimeout,
    ServerBusy,
)
from tests.api.scripted import USAGE, ScriptedSystem, Server, hold, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, timeout_s=20) as connected:
        yield connected


async def test_events_are_typed_and_in_order(client: AsyncClient) -> None:
    events = [event async for event in client.generate("what?")]
    kinds = [type(event) for event in events if not isinstance(event, Delta)]
    assert kinds == [Accepted, Planned, Finished]


async def test_text_and_usage_are_what_the_system_said(client: AsyncClient) -> None:
    generation = client.generate("what?")
    assert await generation.text() == "one two three"
    assert generation.usage == USAGE
    assert generation.result.reason == "stop"


async def test_text_counts_what_was_read_before(client: AsyncClient) -> None:
    generation = client.generate("what?")
    async for event in generation:
        if isinstance(event, Delta):
            break
    assert await generation.text() == "one two three"


async def test_the_result_is_not_there_before_the_end(client: AsyncClient) -> None:
    with pytest.raises(RuntimeError, match="has not finished"):
        _ = client.generate("what?").result


async def test_nothing_is_sent_before_it_is_read(server: Server, client: AsyncClient) -> None:
    client.generate("never read")
    await client.generate("read").text()
    assert [request.messages[0].content for request in server.system.requests] == ["read"]


async def test_leaving_the_context_cancels_on_the_server(server: Server, client: AsyncClient) -> None:
    server.system.script = hold
    async with client.generate("what?") as generation:
        async for event in generation:
            if isinstance(event, Delta):
                break
    await server.system.until(lambda: server.system.cancelled == [generation.response_id])


async def test_aclose_cancels_on_the_server(server: Server, client: AsyncClient) -> None:
    server.system.script = hold
    generation = client.generate("what?")
    await anext(generation)
    await generation.aclose()
    await server.system.until(lambda: len(server.system.cancelled) == 1)
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_dropping_the_last_reference_cancels_on_the_server(server: Server, client: AsyncClient) -> None:
    server.system.script = hold
    generation = client.generate("what?")
    await anext(generation)
    del generation
    gc.collect()
    await server.system.until(lambda: len(server.system.cancelled) == 1)


async def test_cancelling_text_cancels_on_the_server(server: Server, client: AsyncClient) -> None:
    server.system.script = hold
    reading = asyncio.create_task(client.generate("what?").text())
    await server.system.until(lambda: server.system.running == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await server.system.until(lambda: len(server.system.cancelled) == 1)


async def test_closing_the_client_ends_running_generations(server: Server) -> None:
    server.system.script = hold
    client = AsyncClient(server.url)
    generation = client.generate("what?")
    await anext(generation)
    await client.aclose()
    with pytest.raises(ConnectionLost):
        await generation.text()
    await server.system.until(lambda: len(server.system.abandoned) == 1)


async def test_a_refusal_names_status_code_and_field(client: AsyncClient) -> None:
    with pytest.raises(RequestRefused) as caught:
        await client.generate("what?", temperature=float("nan")).text()
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_request", "temperature")


async def test_an_overloaded_server_is_busy(server: Server, client: AsyncClient) -> None:
    server.system.refusal = RequestError("overloaded", "the queue is full", retry_after_s=2.0)
    with pytest.raises(ServerBusy) as caught:
        await client.generate("what?").text()
    assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)


async def test_a_refusal_leaves_its_lane_free(server: Server, client: AsyncClient) -> None:
    for _ in range(40):
        with pytest.raises(RequestRefused):
            await client.generate(" ").text()
    assert await client.generate("what?").text()
    assert len(server.system.requests) == 1


async def test_a_failure_keeps_the_text_so_far(server: Server, client: AsyncClient) -> None:
    async def fail(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Delta(request.request_id, "half an ", (0,)))
        raise RuntimeError("layer 3 broke")

    server.system.script = fail
    with pytest.raises(GenerationFailed, match="layer 3 broke") as caught:
        await client.generate("what?").text()
    assert (caught.value.code, caught.value.text) == ("internal", "half an ")


async def test_a_lost_connection_is_an_error_and_nothing_is_repeated(server: Server, client: AsyncClient) -> None:
    server.system.script = hold
    generation = client.generate("what?")
    await anext(generation)
    server.task.cancel()
    with pytest.raises(ConnectionLost):
        await generation.text()
    assert len(server.system.requests) == 1


async def test_a_server_that_is_not_there_is_connection_lost(server: Server, client: AsyncClient) -> None:
    server.stop.set()
    await server.task
    with pytest.raises(ConnectionLost, match="cannot connect"):
        await client.generate("what?").text()


async def test_silence_times_out_and_cancels(server: Server) -> None:
    server.system.script = hold
    async with AsyncClient(server.url, timeout_s=0.5) as client:
        with pytest.raises(ResponseTimeout, match=r"0\.5 s"):
            await client.generate("what?").text()
        await server.system.until(lambda: len(server.system.cancelled) == 1)


async def test_too_large_a_request_is_refused_before_it_is_sent(server: Server, client: AsyncClient) -> None:
    with pytest.raises(RequestRefused, match="the limit is") as caught:
        await client.generate("x" * (5 << 20)).text()
    assert caught.value.status == 413
    assert await client.generate("what?").text()


async def test_a_lone_surrogate_is_refused_before_it_is_sent(client: AsyncClient) -> None:
    with pytest.raises(RequestRefused, match="cannot be written"):
        await client.generate("\ud800").text()
