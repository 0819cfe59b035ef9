"""HTTP by hand, so that a test can send what no client would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert isinstance(error, dict)
        return error

    @property
    def frames(self) -> list[Any]:
        """The data of every server-sent event; `[DONE]` as text."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def request_bytes(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """HTTP/1.0: no chunked answer, and the end of the connection is the end of the body."""
    lines = [f"{method} {path} HTTP/1.0", "Host: test", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def call(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> RawAnswer:
    """One exchange; `body` is sent as JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(30):
            writer.write(request_bytes(method, path, data, given))
            await writer.drain()
            answer = await reader.read(-1)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return parse_answer(answer)


def parse_answer(answer: bytes) -> RawAnswer:
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return RawAnswer(int(first.split(" ")[1]), headers, rest)
