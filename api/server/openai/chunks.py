"""`/v1/chunks`: store documents ahead of the questions, with progress; list, look at and delete what is stored."""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Failed, Finished, Generate, IngestProgress, StreamEvent
from kvblend.api.server.events import own_fields
from kvblend.api.server.fields import Fields, invalid, show
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.answers import Asked, abandon, collect, submit_all
from kvblend.api.server.openai.endpoint import Api
from kvblend.api.server.openai.exchange import error_body, read_json, run_while_connected
from kvblend.api.server.openai.sse import DONE, Emit, EventSource, frame
from kvblend.api.server.port import ChunkView, EventStream
from kvblend.api.server.requests import parse_documents, parse_model

FIELDS = ("model", "documents", "chunks", "system", "stream", "deadline_ms")
PAGE = 100
_ID = re.compile(r"[0-9a-f]{64}")


async def ingest(api: Api, http: Request) -> ASGIApp:
    """Store documents: one answer at the end, or an event for each that is durable."""
    body = await read_json(http, api.limits)
    call = _parse(body, f"ingest-{secrets.token_hex(16)}", api.system.model, api.limits)
    streams = await run_while_connected(http.receive, submit_all(api.system, call))
    if call.stream:
        return EventSource(lambda emit: _write(streams[0], emit), lambda: abandon(streams), api.limits.ping_s)
    try:
        *_, finished = await run_while_connected(http.receive, collect(streams[0]))
    finally:
        abandon(streams)
    return JSONResponse(_body(finished))


async def listing(api: Api, http: Request) -> ASGIApp:
    """A page of the stored chunks in the order of their ids, from behind `after` on."""
    limit, after = PAGE, http.query_params.get("after", "")
    unknown = set(http.query_params) - {"limit", "after"}
    if unknown:
        name = min(unknown)
        raise invalid(name[:60], "is not a known parameter; known: after, limit")
    if (given := http.query_params.get("limit")) is not None:
        if not given.isascii() or not given.isdecimal() or not 1 <= int(given[:9]) <= api.limits.page_max:
            raise invalid("limit", f"is {show(given)}; it must lie in 1..{api.limits.page_max}")
        limit = int(given[:9])
    if after and not _ID.fullmatch(after):
        raise invalid("after", f"is {show(after)}; it must be a chunk's id")
    found = await api.system.library.page(after, limit + 1)
    data = [_chunk(chunk) for chunk in found[:limit]]
    last = data[-1]["id"] if data else None
    return JSONResponse({"object": "list", "data": data, "last_id": last, "has_more": len(found) > limit})


async def retrieve(api: Api, http: Request) -> ASGIApp:
    """One stored chunk."""
    name = http.path_params["chunk_id"]
    found = await api.system.library.find(name) if _ID.fullmatch(name) else None
    if found is None:
        raise _unknown(name)
    return JSONResponse(_chunk(found))


async def delete(api: Api, http: Request) -> ASGIApp:
    """Delete one stored chunk."""
    name = http.path_params["chunk_id"]
    if not _ID.fullmatch(name) or not await api.system.library.delete(name):
        raise _unknown(name)
    return JSONResponse({"id": name, "object": "chunk", "deleted": True})


def _unknown(name: str) -> RequestError:
    return RequestError("not_found", f"there is no chunk {show(name)}", "chunk_id")


def _parse(body: object, call_id: str, model: str, limits: ApiLimits) -> Asked:
    fields = Fields(body, "", FIELDS)
    named = parse_model(fields, model, limits)
    documents = parse_documents(fields, limits)
    if not documents:
        raise invalid("documents", "is empty; give at least one document")
    request = Generate(
        request_id=call_id,
        documents=documents,
        system=fields.text("system", blank=True),
        model=named,
        deadline_ms=fields.number("deadline_ms", 0, limits.deadline_ms_max, above=True),
        generate=False,
    )
    places = [("documents", "chunks")] if fields.has("chunks") else []
    return Asked([request], bool(fields.flag("stream")), False, places)


async def _write(stream: EventStream, emit: Emit) -> None:
    """Progress, the outcome, `[DONE]`."""
    over = False
    while not over and (events := await stream.drain()):
        out = b"".join(map(_frame, events))
        over = any(isinstance(event, Finished | Failed) for event in events)
        if out:
            await emit(out)
    if not over:
        await emit(frame(error_body(RequestError("internal", "storing ended unexpectedly")), "error"))
    await emit(DONE)


def _frame(event: StreamEvent) -> bytes:
    match event:
        case IngestProgress():
            return frame({"object": "chunks.progress", "done": event.done, "total": event.total}, "chunks.progress")
        case Finished() if event.reason == "cancelled":
            error = RequestError("overloaded", event.detail or "cancelled by the server", retry_after_s=5.0)
            return frame(error_body(error), "error")
        case Finished():
            return frame(_body(event), "chunks.completed")
        case Failed():
            return frame(error_body(RequestError(event.code, event.message, event.param)), "error")
    return b""


def _body(finished: Finished) -> dict[str, Any]:
    data = [{"object": "chunk", **dataclasses.asdict(chunk)} for chunk in finished.chunks]
    return {"object": "list", "data": data, "kvblend": own_fields(finished.usage)}


def _chunk(chunk: ChunkView) -> dict[str, Any]:
    return {"id": chunk.id, "object": "chunk", "tokens": chunk.tokens, "bytes": chunk.bytes}
