"""Connections whose peer neither reads nor sends."""

from __future__ import annotations

import asyncio
import socket

from raw_http import call, parse_answer, request_bytes

from kvblend.actors.messages import Delta, Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import ScriptedSystem, serving

BODY = b'{"messages":[{"role":"user","content":"q"}],"stream":true}'


async def test_a_reader_that_stops_is_cut_and_counted() -> None:
    async def flood(request: Generate, stream: TokenStream) -> None:
        while True:
            stream.push_nowait(Delta(request.request_id, "x" * 100_000))
            await asyncio.sleep(0)

    system = ScriptedSystem(flood)
    async with serving(system, ApiLimits(stall_s=0.2, drain_grace_s=0, close_grace_s=1)) as server:
        raw = socket.create_connection(("127.0.0.1", server.port))
        try:
            head = {"Content-Type": "application/json", "Content-Length": str(len(BODY))}
            raw.sendall(request_bytes("POST", "/v1/chat/completions", BODY, head))
            async with asyncio.timeout(30):
                await system.until(lambda: len(system.abandoned) == 1)
        finally:
            raw.close()
        metrics = await call(server.port, "GET", "/metrics")
    assert b"kvblend:ws_slow_consumer_total 1.0" in metrics.body


async def test_a_head_that_does_not_come_is_given_up() -> None:
    async with serving(ScriptedSystem(), ApiLimits(body_s=0.1, drain_grace_s=0, close_grace_s=1)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HT")
        async with asyncio.timeout(20):
            await asyncio.gather(reader.read(-1), return_exceptions=True)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_websocket_outlives_the_wait_for_a_head() -> None:
    limits = ApiLimits(body_s=0.05, drain_grace_s=0, close_grace_s=1)
    async with serving(ScriptedSystem(), limits) as server, server.peer() as peer:
        # a peer that sends no head is cut, and by then the wait of the first one has passed too
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(reader.read(-1), return_exceptions=True)
        writer.close()
        await peer.create()
        assert (await peer.finish())[-1]["type"] == "response.completed"


async def test_what_is_no_http_is_refused_in_the_shape_of_all_errors() -> None:
    async with serving(ScriptedSystem()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x00\x01nonsense\r\n\r\n")
        async with asyncio.timeout(20):
            answer = parse_answer(await reader.read(-1))
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
