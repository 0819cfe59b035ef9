"""The answers of the two completion routes: streams of events as choices, whole or piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Failed, Finished, Generate, TokenLogprob, Usage
from kvblend.api.server.fields import Places, relocate
from kvblend.api.server.openai.exchange import error_body, run_while_connected
from kvblend.api.server.openai.shapes import Shape, kvblend_body, usage_body
from kvblend.api.server.openai.sse import DONE, Emit, EventSource, frame
from kvblend.api.server.port import EventStream, SystemPort


@dataclass(slots=True)
class Asked:
    """One call, parsed: a request for each prompt, and how the answer is wanted."""

    requests: list[Generate]
    stream: bool
    include_usage: bool
    places: Places = ()

    @property
    def logprobs(self) -> bool:
        """Whether log probabilities are wanted: all prompts of a call are answered alike."""
        return self.requests[0].sampling.logprobs is not None


@dataclass(slots=True)
class _Ends:
    """The terminal events that came, by choice."""

    finished: dict[int, Finished] = field(default_factory=dict)

    @property
    def usages(self) -> list[Usage]:
        return [self.finished[index].usage for index in sorted(self.finished)]


async def answer(system: SystemPort, asked: Asked, shape: Shape, call_id: str, http: Request, ping_s: float) -> ASGIApp:
    """Submit the call and answer it. RequestError before anything was accepted, or where it failed unstreamed."""
    streams = await run_while_connected(http.receive, submit_all(system, asked))
    head = {"id": call_id, "created": int(time.time()), "model": system.model}
    if asked.stream:
        writer = _StreamWriter(streams, asked, shape, head)
        return EventSource(writer.write, lambda: abandon(streams), ping_s)
    try:
        results = await run_while_connected(http.receive, _collect_all(streams))
    except RequestError as error:
        raise relocate(error, asked.places) from None
    finally:
        abandon(streams)
    usages = [finished.usage for *_, finished in results]
    choices = [
        shape.whole(index, text, finished.reason, logprobs if asked.logprobs else None)
        for index, (text, logprobs, finished) in enumerate(results)
    ]
    body = {**head, "object": shape.kind, "choices": choices, "usage": usage_body(usages)}
    return JSONResponse({**body, "kvblend": kvblend_body(usages)})


async def submit_all(system: SystemPort, asked: Asked) -> list[EventStream]:
    """One stream for each request of the call, or RequestError and none."""
    streams: list[EventStream] = []
    several = len(asked.requests) > 1
    try:
        for index, request in enumerate(asked.requests):
            places = [*asked.places, ("prompt", f"prompt[{index}]")] if several else asked.places
            try:
                streams.append(await system.submit(request))
            except RequestError as error:
                raise relocate(error, places) from None
    except BaseException:
        abandon(streams)
        raise
    return streams


def abandon(streams: Sequence[EventStream]) -> None:
    """Nobody reads these any more; those that have ended do not mind."""
    for stream in streams:
        stream.abandon()


async def collect(stream: EventStream) -> tuple[str, list[TokenLogprob], Finished]:
    """Text, log probabilities and end of one stream. RequestError where it failed, or was cancelled by the server."""
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    while events := await stream.drain():
        for event in events:
            if isinstance(event, Delta):
                texts.append(event.text)
                logprobs += event.logprobs
            elif isinstance(event, Finished):
                _check_complete(event)
                return "".join(texts), logprobs, event
            elif isinstance(event, Failed):
                raise RequestError(event.code, event.message, event.param)
    raise RequestError("internal", "the answer ended unexpectedly")


async def _collect_all(streams: Sequence[EventStream]) -> list[tuple[str, list[TokenLogprob], Finished]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(stream)) for stream in streams]
    except* RequestError as errors:
        first = errors.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]


def _check_complete(event: Finished) -> None:
    # the client did not ask for this end, and an answer that only looks complete would be a lie
    if event.reason == "cancelled":
        raise RequestError("overloaded", event.detail or "cancelled by the server", retry_after_s=5.0)


class _StreamWriter:
    """Writes the frames of one call; the pieces of several prompts as they come."""

    def __init__(self, streams: Sequence[EventStream], asked: Asked, shape: Shape, head: dict[str, Any]) -> None:
        self._streams = streams
        self._asked = asked
        self._shape = shape
        self._head = {**head, "object": shape.piece_kind}
        self._ends = _Ends()

    async def write(self, emit: Emit) -> None:
        """Send everything up to and with `[DONE]`; an error that comes after the first byte is a frame before it."""
        try:
            if len(self._streams) == 1:
                await self._forward(0, self._streams[0], emit)
            else:
                await self._forward_all(emit)
        except RequestError as error:
            await emit(frame(error_body(relocate(error, self._asked.places))))
        else:
            if self._asked.include_usage:
                usages = self._ends.usages
                last = {**self._head, "choices": [], "usage": usage_body(usages), "kvblend": kvblend_body(usages)}
                await emit(frame(last))
        await emit(DONE)

    async def _forward_all(self, emit: Emit) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in enumerate(self._streams):
                    group.create_task(self._forward(index, stream, emit))
        except* RequestError as errors:
            first = errors.exceptions[0]
            raise first from None

    async def _forward(self, index: int, stream: EventStream, emit: Emit) -> None:
        if (opening := self._shape.opening(index)) is not None:
            await emit(self._frame(opening))
        while events := await stream.drain():
            out = bytearray()
            for event in events:
                if isinstance(event, Delta):
                    logprobs = event.logprobs if self._asked.logprobs else None
                    out += self._frame(self._shape.piece(index, event.text, logprobs))
                elif isinstance(event, Finished):
                    if event.reason != "cancelled":
                        out += self._frame(self._shape.ending(index, event.reason))
                    self._ends.finished[index] = event
                elif isinstance(event, Failed):
                    raise RequestError(event.code, event.message, event.param)
            if out:
                await emit(bytes(out))
            if index in self._ends.finished:
                _check_complete(self._ends.finished[index])
                return
        raise RequestError("internal", "the answer ended unexpectedly")

    def _frame(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._asked.include_usage else {}
        return frame({**self._head, "choices": [choice], **usage})
