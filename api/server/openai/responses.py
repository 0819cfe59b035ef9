"""`POST /v1/responses` over HTTP, and asking for, cancelling and forgetting a response by its id."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvblend.actors.errors import RequestError
from kvblend.api.server.events import ResponseEvents
from kvblend.api.server.fields import PREVIOUS, Fields, check_text, invalid, relocate, show
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.answers import Asked, submit_all
from kvblend.api.server.openai.endpoint import Api, Visit
from kvblend.api.server.openai.event_log import EventLog
from kvblend.api.server.openai.exchange import read_json, run_while_connected
from kvblend.api.server.openai.runs import Run
from kvblend.api.server.openai.sse import Emit, EventSource, frame
from kvblend.api.server.requests import Create, FrameIds, parse_body

METADATA_MAX, METADATA_CHARS_MAX = 16, 512
QUERY = ("stream", "starting_after", "include_obfuscation")
SEQUENCE_DIGITS_MAX = 15


async def create(api: Api, http: Request) -> ASGIApp:
    """Take a response: whole, as events, or in the background, where its events can be read again."""
    body = await read_json(http, api.limits)
    name = f"resp_{secrets.token_hex(16)}"
    asked, stream, background = parse_body(body, name, api.system.model, api.limits, api.kept.earlier)
    echo, store = _echo(body, asked, api.limits)
    call = Asked([asked.request], stream, False, [*asked.places, ("max_output_tokens", "max_output_tokens")])
    streams = await run_while_connected(http.receive, submit_all(api.system, call))
    translator = ResponseEvents(
        name,
        api.system.model,
        time.time(),
        FrameIds(),
        extended=False,
        generate=asked.request.generate,
        echo={**echo, "background": background},
    )
    log = EventLog() if background else None
    run = Run(api.system, streams[0], translator, api.kept if store or background else None, asked.request, log)
    api.runs[name] = run
    if log is not None:
        _run_in_background(api, name, run)
        return _replay(api, log) if stream else JSONResponse(run.response)

    def end() -> None:
        run.close()
        api.runs.pop(name, None)

    if stream:
        return EventSource(lambda emit: _write(run, emit), end, api.limits.ping_s)
    try:
        return JSONResponse(await run_while_connected(http.receive, run.finish()))
    except RequestError as error:
        raise relocate(error, asked.places) from None
    finally:
        end()


async def retrieve(api: Api, http: Request) -> ASGIApp:
    """The newest state of a response, or with `stream` its events, behind number `starting_after` if that is given."""
    stream, after = _parse_query(http.query_params)
    response = _find(api, http)
    if not stream:
        return JSONResponse(response)
    log = api.kept.log(response["id"])
    if log is None:
        reason = "it was not created with background: true, or they took too much room"
        raise invalid("stream", f"the events of this response are not kept: {reason}")
    if after > log.newest:
        raise invalid("starting_after", f"is {after}; the newest event has {log.newest}")
    return _replay(api, log, after)


def _replay(api: Api, log: EventLog, after: int = -1) -> ASGIApp:
    async def write(emit: Emit) -> None:
        async for frames in log.follow(after):
            await emit(frames)

    return EventSource(write, lambda: None, api.limits.ping_s)


def _parse_query(given: Mapping[str, str]) -> tuple[bool, int]:
    """Whether events are wanted, and from behind which on."""
    for name in given:
        if name not in QUERY:
            raise invalid(name[:60], f"is not a known parameter; known: {', '.join(QUERY)}")
    for name in ("stream", "include_obfuscation"):
        if (flag := given.get(name, "false")) not in ("true", "false"):
            raise invalid(name, f"is {show(flag)}; it must be true or false")
    stream, after = given.get("stream") == "true", given.get("starting_after")
    if after is None:
        return stream, -1
    if not stream:
        raise invalid("starting_after", "is for events; give stream=true with it")
    if not (after.isascii() and after.isdecimal() and len(after) <= SEQUENCE_DIGITS_MAX):
        raise invalid("starting_after", f"is {show(after)}; it must be the sequence_number of an event")
    return stream, int(after)


async def cancel(api: Api, http: Request) -> ASGIApp:
    """End a response that runs, and wait for its end."""
    name = http.path_params["response_id"]
    run = api.runs.get(name)
    if run is None:
        status = _find(api, http)["status"]
        raise RequestError("invalid_request", f"response {show(name)} is {status}: it cannot be cancelled any more")
    run.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(api.limits.close_grace_s):
            await run.ended.wait()
    return JSONResponse(run.response)


async def forget(api: Api, http: Request) -> ASGIApp:
    """Delete a kept response; one that runs is cancelled."""
    name = http.path_params["response_id"]
    _find(api, http)
    if (run := api.runs.get(name)) is not None:
        run.forget()
    api.kept.drop(name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


def _find(api: Api, http: Request) -> dict[str, Any]:
    name = http.path_params["response_id"]
    response = api.kept.get(name)
    if response is None:
        raise RequestError("not_found", f"response {show(name)} is unknown or no longer kept", "response_id")
    return response


async def _write(run: Run, emit: Emit) -> None:
    async for events in run.events():
        await emit(b"".join(frame(event, event["type"]) for event in events))


def _run_in_background(api: Api, name: str, run: Run) -> None:
    visit = Visit()
    api.gate.enter(visit)

    async def read() -> None:
        try:
            async for _ in run.events():
                pass
        finally:
            run.close()

    task = asyncio.create_task(read(), name=f"background-{name}")
    api.tasks.add(task)

    def end(done: asyncio.Task[None]) -> None:
        api.tasks.discard(done)
        api.runs.pop(name, None)
        api.gate.leave(visit)

    task.add_done_callback(end)


def _echo(body: object, asked: Create, limits: ApiLimits) -> tuple[dict[str, Any], bool]:
    """What a response repeats of its request, and whether it is to be kept."""
    known = body if isinstance(body, dict) else {}
    fields = Fields({name: known.get(name) for name in ("metadata", "store")}, "", ("metadata", "store"))
    store = fields.flag("store")
    metadata = fields.raw("metadata")
    if metadata is not None:
        if not isinstance(metadata, dict):
            raise invalid("metadata", f"must be an object of texts, not {show(metadata)}")
        if len(metadata) > METADATA_MAX:
            raise invalid("metadata", f"has {len(metadata)} fields; the limit is {METADATA_MAX}")
        for key, value in metadata.items():
            path = f"metadata.{key[: limits.id_chars_max]}"
            check_text(key, path, chars_max=METADATA_CHARS_MAX, blank=True)
            check_text(value, path, chars_max=METADATA_CHARS_MAX, blank=True)
    sampling = asked.request.sampling
    echo = {
        "instructions": known.get("instructions"),
        PREVIOUS: asked.previous,
        "metadata": metadata or {},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": sampling.logprobs or 0,
        "max_output_tokens": sampling.max_tokens,
        "store": store is not False,
    }
    return echo, store is not False
