"""Requests over a kvblend server's WebSocket: by `AsyncClient`, or on a bare socket where a client misbehaves."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from typing import Any

from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from kvblend import AsyncClient
from kvblend.actors.messages import Delta, Failed, Finished, StreamEvent, Usage
from kvblend.api.client.wire import SUBPROTOCOL, create_frame, decode, encode, parse_event, websocket_url
from loadtest.jobs import Job
from loadtest.options import Options
from loadtest.outcome import Recording, RequestFailed, Status

CONNECTIONS_MAX = 4096


def make_fields(job: Job, pool: tuple[str, ...], options: Options) -> dict[str, Any]:
    """The arguments of `AsyncClient.generate` for a job."""
    texts = [pool[place] for place in job.chunks]
    fields: dict[str, Any] = {"query": job.question, "max_tokens": job.output_tokens}
    if texts and options.chunks_as == "text":
        fields["query"] = options.separator.join((*texts, job.question))
    elif texts:
        fields["documents"] = texts
    optional = {
        "system": options.system or None,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "ignore_eos": options.ignore_eos or None,
    }
    return fields | {name: value for name, value in optional.items() if value is not None} | options.extra_body


def note_usage(usage: Usage, recording: Recording) -> None:
    """The server's figures, also under OpenAI's names."""
    recording.figures = dataclasses.asdict(usage)
    details = {"cached_tokens": usage.tokens_reused}
    recording.usage = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "prompt_tokens_details": details,
    }


def read_event(event: StreamEvent | None, recording: Recording) -> bool:
    """Note what an event says; whether the job wants to stop. RequestFailed where the server gave up."""
    match event:
        case Delta():
            return recording.note(event.text, time.monotonic())
        case Finished():
            note_usage(event.usage, recording)
            if event.reason not in ("stop", "length"):
                raise RequestFailed(f"ended early: {event.reason} {event.detail}".rstrip())
        case Failed():
            raise RequestFailed(f"{event.code}: {event.message}")
        case _:
            pass
    return False


class WsTransport:
    """Lanes over shared connections; a slow reader, or one that is cut off, has a connection of its own."""

    def __init__(self, options: Options, pool: tuple[str, ...], model: str) -> None:
        self._options = options
        self._pool = pool
        self._model = model
        self._client = AsyncClient(
            options.base_url,
            model=model,
            timeout_s=options.timeout,
            connections_max=CONNECTIONS_MAX,
            api_key=os.environ.get("OPENAI_API_KEY"),
        )

    async def run(self, job: Job, recording: Recording) -> Status:
        """See `Transport.run`."""
        async with asyncio.timeout(self._options.timeout):
            if job.behaviour in ("slow", "disconnect"):
                return await self._run_bare(job, recording)
            recording.sent = time.monotonic()
            async with self._client.generate(**make_fields(job, self._pool, self._options)) as generation:
                async for event in generation:
                    if read_event(event, recording):
                        return "cancelled"
        return "ok"

    async def _run_bare(self, job: Job, recording: Recording) -> Status:
        url = websocket_url(self._options.base_url)
        given: dict[str, Any] = {"mode": "blend", "temperature": 0.0} | make_fields(job, self._pool, self._options)
        frame = encode(create_frame(model=self._model, **given))
        recording.sent = time.monotonic()
        # with one message at a time in its queue the socket is not read ahead, so the server feels the slowness
        async with connect(
            url,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            additional_headers=self._options.headers,
            max_size=None,
            max_queue=1,
            ping_interval=None,
        ) as socket:
            await socket.send(frame)
            while True:
                message = decode(await socket.recv())
                if message.get("type") == "error":
                    raise RequestFailed(str(message.get("error")))
                event = parse_event(message)
                if read_event(event, recording):
                    socket.transport.abort()
                    return "disconnected"
                if isinstance(event, Finished):
                    return "ok"
                if job.behaviour == "slow":
                    await asyncio.sleep(self._options.slow_reader_ms / 1000)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
