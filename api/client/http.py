"""The two plain HTTP questions a client asks, without an HTTP library."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from kvblend.api.client.errors import ConnectionLost

_ANSWER_BYTES_MAX = 1 << 20


async def get_json(url: str, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """`(status, body)` of a GET to the host of `url`; ConnectionLost if no proper answer comes."""
    parts = urlsplit(url)
    secure = parts.scheme in ("wss", "https")
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _exchange(host, port, secure, path)
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), dict(json.loads(body))
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise ConnectionLost(f"no answer from http://{host}:{port}{path}: {error or 'timed out'}") from error


async def _exchange(host: str, port: int, secure: bool, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=secure or None)
    try:
        # HTTP/1.0: no chunked answer, and the end of the connection is the end of the body
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: application/json\r\n\r\n".encode())
        await writer.drain()
        answer = b""
        while len(answer) < _ANSWER_BYTES_MAX and (block := await reader.read(1 << 16)):
            answer += block
        return answer
    finally:
        writer.close()
        await writer.wait_closed()
