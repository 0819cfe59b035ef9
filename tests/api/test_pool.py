from __future__ import annotations

import asyncio

import pytest

from kvblend.actors.messages import Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.client import AsyncClient, ServerBusy
from kvblend.api.client.pool import Pool
from kvblend.api.client.wire import create_frame, websocket_url
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import ScriptedSystem, answer, hold, serving


async def test_fifty_requests_at_once_share_four_connections() -> None:
    release = asyncio.Event()

    async def wait_then_answer(request: Generate, stream: TokenStream) -> None:
        await release.wait()
        await answer(request, stream)

    # a fifth connection would be refused
    limits = ApiLimits(connections_max=4, drain_grace_s=0.0)
    async with serving(ScriptedSystem(wait_then_answer), limits) as server, AsyncClient(server.url) as client:
        asks = [asyncio.create_task(client.generate(f"q{i}").text()) for i in range(50)]
        await server.system.until(lambda: len(server.system.requests) == 50)
        release.set()
        assert await asyncio.gather(*asks) == ["one two three"] * 50


async def test_a_full_pool_waits_for_a_lane() -> None:
    async with serving(ScriptedSystem()) as server, AsyncClient(server.url, connections_max=1) as client:
        texts = await asyncio.gather(*(client.generate(f"q{i}").text() for i in range(60)))
    assert texts == ["one two three"] * 60
    assert len(server.system.requests) == 60


async def test_cancelled_generations_give_their_lanes_back() -> None:
    async with serving(ScriptedSystem(hold)) as server, AsyncClient(server.url, connections_max=1) as client:
        for _ in range(40):
            async with client.generate("what?") as generation:
                await anext(generation)
        assert len(server.system.requests) == 40


async def test_a_refused_connection_is_busy() -> None:
    async with (
        serving(ScriptedSystem(hold), ApiLimits(connections_max=1, drain_grace_s=0.0)) as server,
        AsyncClient(server.url) as first,
        AsyncClient(server.url) as second,
        first.generate("what?") as generation,
    ):
        await anext(generation)
        with pytest.raises(ServerBusy) as caught:
            await second.generate("what?").text()
    assert caught.value.retry_after_s == 1.0


async def test_a_dead_connection_is_replaced() -> None:
    async with serving(ScriptedSystem()) as server:
        pool = Pool(websocket_url(server.url), 10, 8)
        first = await pool.take()
        await first.connection.close()
        second = await pool.take()
        await second.send(create_frame(query="what?"))
        await second.inbox.get()
        assert pool.open_connections == 1
        await pool.close()
