from __future__ import annotations

import asyncio

import pytest

from kvblend.api.client.errors import ConnectionLost
from kvblend.api.client.http import get_json


async def ask(answer: bytes) -> tuple[int, dict[str, object]]:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        return await get_json(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/responses", "/ready", 10)


async def test_status_and_body_are_read() -> None:
    assert await ask(b'HTTP/1.1 503 No\r\nX: y\r\n\r\n{"ready": false}') == (503, {"ready": False})


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n\r\nnot json", b"SSH-2.0\r\n\r\n{}", b"HTTP/1.1 200 OK\r\n\r\n3"]
)
async def test_another_kind_of_answer_is_connection_lost(answer: bytes) -> None:
    with pytest.raises(ConnectionLost, match="no answer"):
        await ask(answer)


async def test_nobody_there_is_connection_lost() -> None:
    with pytest.raises(ConnectionLost, match=r"no answer from http://127.0.0.1:1/health"):
        await get_json("ws://127.0.0.1:1", "/health", 10)
