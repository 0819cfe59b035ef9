"""One HTTP exchange: its body read and checked, its errors written, its client watched while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from math import ceil
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from kvblend.actors.errors import RequestError
from kvblend.api.server.codec import PLAIN_JSON
from kvblend.api.server.events import error_fields
from kvblend.api.server.fields import show
from kvblend.api.server.limits import ApiLimits

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The client went away: nobody reads an answer any more."""


async def read_json(request: Request, limits: ApiLimits) -> object:
    """The JSON body. RequestError for another type, a body too large, late, no UTF-8, or no JSON; ClientGone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("unsupported_media_type", f"content-type is {show(kind)}; send application/json")
    body = await _read_body(request, limits)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("invalid_request", f"the body is not valid UTF-8 at byte {error.start}") from None
    try:
        return PLAIN_JSON.decode(text, limits)
    except RequestError as error:
        raise RequestError(error.code, error.message.replace("the frame", "the body", 1)) from None


async def _read_body(request: Request, limits: ApiLimits) -> bytes:
    limit, body = limits.message_bytes_max, bytearray()
    announced = request.headers.get("content-length", "0")
    # more digits than any length needs are not worth converting
    if len(announced) > 18 or (announced.isdecimal() and int(announced) > limit):
        raise RequestError("too_large", f"the body has {announced[:20]} bytes; the limit is {limit}")
    try:
        async with asyncio.timeout(limits.body_s):
            async for block in request.stream():
                body += block
                if len(body) > limit:
                    raise RequestError("too_large", f"the body has more than {limit} bytes, which is the limit")
    except TimeoutError:
        raise RequestError("invalid_request", f"the body did not arrive within {limits.body_s:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def error_response(error: RequestError) -> JSONResponse:
    """The answer of a refused request, in OpenAI's shape."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, ceil(error.retry_after_s)))}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers)


def error_body(error: RequestError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, with the status once more."""
    return {"error": error_fields(error.code, error.message, error.param)}


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it and raise ClientGone when the client goes away first. The body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
