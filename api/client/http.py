"""The two plain HTTP questions a client asks, without an HTTP library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvblend.api.client.errors import ConnectionLost

_ANSWER_BYTES_MAX = 1 << 20


def bearer_headers(api_key: str | None) -> dict[str, str]:
    """The headers that show a key. ValueError where it holds what no header may."""
    if api_key is None:
        return {}
    # the key is not shown: whoever reads the error may not be its owner
    if not api_key.isascii() or not api_key.isprintable() or not api_key.strip():
        raise ValueError("api_key must be printable ASCII characters")
    return {"Authorization": f"Bearer {api_key}"}


async def get_json(
    url: str, path: str, timeout_s: float, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """`(status, body)` of a GET to the host of `url`; ConnectionLost if no proper answer comes."""
    parts = urlsplit(url)
    secure = parts.scheme in ("wss", "https")
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _exchange(host, port, secure, path, headers or {})
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), dict(json.loads(body))
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise ConnectionLost(f"no answer from http://{host}:{port}{path}: {error or 'timed out'}") from error


async def _exchange(host: str, port: int, secure: bool, path: str, headers: Mapping[str, str]) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=secure or None)
    try:
        # HTTP/1.0: no chunked answer, and the end of the connection is the end of the body
        lines = [f"GET {path} HTTP/1.0", f"Host: {host}:{port}", "Accept: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        await writer.drain()
        answer = b""
        while len(answer) < _ANSWER_BYTES_MAX and (block := await reader.read(1 << 16)):
            answer += block
        return answer
    finally:
        writer.close()
        await writer.wait_closed()
