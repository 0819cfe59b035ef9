from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgpack
import pytest
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_sockets
from websockets.typing import Subprotocol

from kvblend.actors.messages import Accepted
from kvblend.api.client.connection import LANES_MAX, LaneConnection
from kvblend.api.client.errors import ConnectionLost, RequestRefused
from kvblend.api.client.wire import create_frame

Handler = Callable[[ServerConnection], Awaitable[None]]


@contextlib.asynccontextmanager
async def fake_server(handler: Handler) -> AsyncIterator[str]:
    """A server that does with each connection what the test says."""
    names = [Subprotocol("kvblend.v1.msgpack")]
    async with serve_sockets(handler, "127.0.0.1", 0, subprotocols=names, compression=None) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/v1/responses"


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[LaneConnection]:
    connection = await LaneConnection.open(url, 10, lambda: None)
    try:
        yield connection
    finally:
        await connection.close()


async def swallow(socket: ServerConnection) -> None:
    async for _ in socket:
        pass


async def test_lanes_are_free_until_the_limit() -> None:
    async with fake_server(swallow) as url, connected(url) as connection:
        tickets = [connection.take() for _ in range(LANES_MAX)]
        assert not connection.free
        tickets[3].release()
        assert connection.free
        assert connection.take().lane == tickets[3].lane


@pytest.mark.parametrize(
    "frame", [b"\xc1", msgpack.packb([1]), msgpack.packb({"type": "response.failed", "stream_id": "lane-0"})]
)
async def test_nonsense_from_the_server_ends_the_connection(frame: bytes) -> None:
    async def talk_nonsense(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(frame)
        await swallow(socket)

    async with fake_server(talk_nonsense) as url, connected(url) as connection:
        ticket = connection.take()
        await ticket.send(create_frame(query="what?"))
        with pytest.raises(ConnectionLost):
            await ticket.inbox.get()
        assert not connection.alive


async def test_events_of_unknown_types_are_skipped() -> None:
    async def say_more(socket: ServerConnection) -> None:
        frame = msgpack.unpackb(await socket.recv())
        lane = {"stream_id": frame["stream_id"], "response_id": "r"}
        await socket.send(msgpack.packb({"type": "response.tomorrow", **lane}))
        await socket.send(msgpack.packb({"type": "response.created", **lane, "response": {"model": "m"}}))
        await swallow(socket)

    async with fake_server(say_more) as url, connected(url) as connection:
        ticket = connection.take()
        await ticket.send(create_frame(query="what?"))
        assert await ticket.inbox.get() == Accepted("r", "m")


async def test_the_close_code_is_kept() -> None:
    async def leave(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.close(1012, "restarting")

    async with fake_server(leave) as url, connected(url) as connection:
        ticket = connection.take()
        await ticket.send(create_frame(query="what?"))
        with pytest.raises(ConnectionLost, match=r"by the server.*1012.*restarting") as caught:
            await ticket.inbox.get()
    assert caught.value.close_code == 1012


async def test_a_cancel_that_finds_nothing_frees_the_lane() -> None:
    async def know_nothing(socket: ServerConnection) -> None:
        async for data in socket:
            frame = msgpack.unpackb(data)
            error = {"code": "not_found", "message": "nothing runs", "param": None}
            ids = {"event_id": frame["event_id"], "stream_id": frame["stream_id"]}
            await socket.send(msgpack.packb({"type": "error", "status": 404, "error": error, **ids}))

    async with fake_server(know_nothing) as url, connected(url) as connection:
        ticket = connection.take()
        ticket.cancel_nowait()
        with pytest.raises(RequestRefused, match="nothing runs"):
            await ticket.inbox.get()
        assert connection.take().lane == ticket.lane


async def test_a_port_without_a_server_is_connection_lost() -> None:
    with pytest.raises(ConnectionLost, match="cannot connect"):
        await LaneConnection.open("ws://127.0.0.1:1/v1/responses", 10, lambda: None)


async def test_a_server_that_never_answers_is_connection_lost() -> None:
    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLost, match="no answer"):
            await LaneConnection.open(f"ws://127.0.0.1:{port}/v1/responses", 0.2, lambda: None)
