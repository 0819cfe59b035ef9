"""Requests as server-sent events: chat completions and completions, of any server that has them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp

from loadtest.jobs import Job
from loadtest.options import Options
from loadtest.outcome import Recording, RequestFailed, Status

ERROR_CHARS_MAX = 300
SLOW_BUFFER_BYTES = 1024
HEAD = "Answer from these texts."
"""Before the chunks of a plain prompt without a system text: its first piece counts as none of them."""


class EventParser:
    """Cuts a stream of bytes into the data of its events, wherever the bytes are parted."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, block: bytes) -> Iterator[str]:
        """The data of the events that end within `block`."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif not line and self._data:
                data, self._data = "\n".join(self._data), []
                yield data


def make_body(job: Job, pool: tuple[str, ...], options: Options, model: str) -> dict[str, Any]:
    """The request of a job; chunks are a field, parts of the message, or joined with the separator."""
    texts = [pool[place] for place in job.chunks]
    body: dict[str, Any] = {"model": model, "max_tokens": job.output_tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    optional = {"temperature": options.temperature, "top_p": options.top_p, "ignore_eos": options.ignore_eos or None}
    body |= {name: value for name, value in optional.items() if value is not None}
    question: Any = job.question
    if texts and options.chunks_as == "documents":
        body["documents"] = [{"text": text} for text in texts]
    elif texts and options.chunks_as == "parts":
        question = [{"type": "text", "text": text} for text in (*texts, job.question)]
    elif texts:
        question = options.separator.join((*texts, job.question))
    if options.backend in ("openai", "vllm"):
        head = options.system or (HEAD if texts else "")
        body["prompt"] = options.separator.join(part for part in (head, question) if part)
    else:
        first = [{"role": "system", "content": options.system}] if options.system else []
        body["messages"] = [*first, {"role": "user", "content": question}]
    return body | options.extra_body


def read_chunk(data: str, recording: Recording, now: float) -> bool:
    """Note what an event says; whether the job wants to stop. RequestFailed for an error."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise RequestFailed(f"an event is no JSON: {data[:ERROR_CHARS_MAX]}") from None
    if not isinstance(chunk, dict):
        raise RequestFailed(f"an event is no object: {data[:ERROR_CHARS_MAX]}")
    if error := chunk.get("error"):
        raise RequestFailed(str(error.get("message", error) if isinstance(error, dict) else error)[:ERROR_CHARS_MAX])
    if isinstance(chunk.get("usage"), dict):
        recording.usage = chunk["usage"]
    if isinstance(chunk.get("kvblend"), dict):
        recording.figures = chunk["kvblend"]
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if piece:
            return recording.note(piece, now)
    return False


class SseTransport:
    """One HTTP session; as many connections as there are requests at once."""

    def __init__(self, options: Options, pool: tuple[str, ...], model: str) -> None:
        self._options = options
        self._pool = pool
        self._model = model
        connector = aiohttp.TCPConnector(limit=0, ssl=not options.insecure)
        timeout = aiohttp.ClientTimeout(total=options.timeout)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=options.headers)

    async def run(self, job: Job, recording: Recording) -> Status:
        """See `Transport.run`."""
        slow = job.behaviour == "slow"
        # bytes before the clock starts: writing them is not the server's time
        data = json.dumps(make_body(job, self._pool, self._options, self._model)).encode()
        size = SLOW_BUFFER_BYTES if slow else 1 << 16
        headers = {"Content-Type": "application/json"}
        recording.sent = time.monotonic()
        async with self._session.post(self._options.url, data=data, headers=headers, read_bufsize=size) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:ERROR_CHARS_MAX]
                raise RequestFailed(f"HTTP {response.status}: {text}")
            return await self._read(response, recording, self._options.slow_reader_ms / 1000 if slow else 0.0)

    async def _read(self, response: aiohttp.ClientResponse, recording: Recording, pause_s: float) -> Status:
        parser = EventParser()
        async for block in response.content.iter_any():
            now = time.monotonic()
            for data in parser.feed(block):
                if data == "[DONE]":
                    return "ok"
                if read_chunk(data, recording, now):
                    return self._leave(response, recording.job)
            if pause_s:
                await asyncio.sleep(pause_s)
        raise RequestFailed("the stream ended before [DONE]")

    def _leave(self, response: aiohttp.ClientResponse, job: Job) -> Status:
        transport = response.connection.transport if response.connection is not None else None
        if job.behaviour == "disconnect" and transport is not None:
            transport.abort()
        response.close()
        return "disconnected" if job.behaviour == "disconnect" else "cancelled"

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()
