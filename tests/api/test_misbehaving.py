from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgpack
import pytest
from websockets.exceptions import ConnectionClosed

from kvblend.actors.messages import Delta, Finished, Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import USAGE, Peer, ScriptedSystem, Server, answer, hold, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


async def close_code(peer: Peer) -> int:
    """Read until the server closes; its code."""
    async with asyncio.timeout(20):
        while True:
            try:
                await peer.socket.recv()
            except ConnectionClosed as error:
                return 0 if error.rcvd is None else error.rcvd.code


@pytest.mark.parametrize(
    "data", [b"\xc1", b"", b"\x81", b"\x81\xa4type\xa3\xff\xfe\xfd", b"\xd4\x01\x00", b"\xc4\x01a"]
)
async def test_undecodable_msgpack_is_an_error_and_the_connection_stays(server: Server, data: bytes) -> None:
    async with server.peer() as peer:
        await peer.socket.send(data)
        error = await peer.error()
        await peer.create()
        await peer.finish()
    assert (error["status"], error["code"]) == (400, "invalid_request")


async def test_the_wrong_kind_of_frame_closes_with_1003(server: Server) -> None:
    async with server.peer() as peer:
        await peer.socket.send("text")
        assert await close_code(peer) == 1003


async def test_an_oversized_frame_closes_with_1009() -> None:
    limits = ApiLimits(message_bytes_max=1000, drain_grace_s=0.0)
    async with serving(ScriptedSystem(), limits) as server, server.peer() as peer:
        await peer.create(instructions="x" * 2000)
        assert await close_code(peer) == 1009


async def test_invalid_utf8_in_a_text_frame_closes_with_1007(server: Server) -> None:
    async with server.peer("kvblend.v1.json") as peer:
        await peer.socket.send(b"\xff\xfe", text=True)
        assert await close_code(peer) == 1007


async def test_a_vanished_client_abandons_all_its_streams(server: Server) -> None:
    server.system.script = hold
    async with server.peer() as peer:
        for name in ("a", "b", "c"):
            await peer.create(stream_id=name)
        await server.system.until(lambda: server.system.running == 3)
        peer.socket.transport.abort()
        await server.system.until(lambda: len(server.system.abandoned) == 3)
    assert server.system.running == 0


async def test_a_client_that_says_goodbye_abandons_its_streams(server: Server) -> None:
    server.system.script = hold
    async with server.peer() as peer:
        await peer.create()
        await peer.until("response.output_text.delta")
    await server.system.until(lambda: len(server.system.abandoned) == 1)


async def flood(request: Generate, stream: TokenStream) -> None:
    while True:
        stream.push_nowait(Delta(request.request_id, "x" * (1 << 18), (0,)))
        await asyncio.sleep(0)


async def test_a_stalled_reader_is_cut_off_and_others_go_on() -> None:
    limits = ApiLimits(stall_s=0.3, close_grace_s=0.3, drain_grace_s=0.0)
    async with serving(ScriptedSystem(flood), limits) as server:
        reader, writer = await ask_unread(server)
        await server.system.until(lambda: len(server.system.abandoned) == 1)
        server.system.script = answer
        async with server.peer() as peer:
            await peer.create()
            await peer.finish()
        # cut rather than kept waiting for room: the stream ends without our reading what was on its way first
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 20):
                    pass
        writer.close()


async def test_a_half_open_connection_is_given_up_when_its_pongs_stay_out() -> None:
    limits = ApiLimits(ping_s=0.2, close_grace_s=0.2, drain_grace_s=0.0)
    async with serving(ScriptedSystem(hold), limits) as server:
        _, writer = await ask_unread(server)
        # nothing is closed and nothing is read: as if the cable had been pulled
        await server.system.until(lambda: len(server.system.abandoned) == 1)
        assert server.system.running == 0
        writer.close()


async def handshake(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection whose owner decides when it reads."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 12)
    writer.write(
        b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: kvblend.v1.msgpack\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def ask_unread(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection that has asked for a response, of which nothing is read."""
    reader, writer = await handshake(server)
    writer.write(masked_frame({"type": "response.create", "input": "what?"}))
    await writer.drain()
    return reader, writer


def masked_frame(frame: object) -> bytes:
    data = bytes(msgpack.packb(frame))
    assert len(data) < 126
    return bytes([0x82, 0x80 | len(data), 0, 0, 0, 0]) + data


async def test_a_slow_reader_gets_every_delta() -> None:
    words = [f"w{i} " for i in range(500)]

    async def many(request: Generate, stream: TokenStream) -> None:
        for word in words:
            stream.push_nowait(Delta(request.request_id, word, (0,)))
            await asyncio.sleep(0)
        stream.push_nowait(Finished(request.request_id, "stop", USAGE))

    async with serving(ScriptedSystem(many)) as server, server.peer(max_queue=1) as peer:
        await peer.create()
        await server.system.until(lambda: bool(server.system.streams) and server.system.running == 0)
        frames = await peer.finish()
    deltas = [f["delta"] for f in frames if f["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "".join(words)


async def visit(server: Server, index: int, terminals: list[str]) -> None:
    """One client: a third ask to cancel, a third vanish in the middle, a third read to the end."""
    async with server.peer() as peer:
        await peer.create()
        frames = await peer.until("response.created")
        if index % 3 == 1:
            await peer.send({"type": "response.cancel", "response_id": frames[0]["response_id"]})
        if index % 3 == 2:
            peer.socket.transport.abort()
            return
        end = (await peer.finish())[-1]
        terminals.append(end["response"]["id"])


async def test_fifty_clients_a_third_cancelling_a_third_vanishing() -> None:
    release = asyncio.Event()

    async def wait_then_answer(request: Generate, stream: TokenStream) -> None:
        await release.wait()
        await answer(request, stream)

    async with serving(ScriptedSystem(wait_then_answer)) as server:
        system, terminals = server.system, list[str]()
        visits = [asyncio.create_task(visit(server, index, terminals)) for index in range(50)]
        await system.until(lambda: len(system.requests) == 50)
        await system.until(lambda: len(system.abandoned) == 16 and len(system.cancelled) == 17)
        release.set()
        await asyncio.gather(*visits)
        await system.until(lambda: system.running == 0)
    everyone = {request.request_id for request in system.requests}
    assert len(everyone) == 50
    # exactly one of the two for each: nobody is in both lists, nobody twice, nobody is missing
    assert sorted(terminals + system.abandoned) == sorted(everyone)
