"""What every route does alike: request ids, origins, the gate, and one shape for all errors."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvblend.actors.errors import RequestError
from kvblend.api.server.gate import Gate
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.exchange import ClientGone, error_response
from kvblend.api.server.openai.kept import KeptResponses
from kvblend.api.server.openai.runs import Run
from kvblend.api.server.port import SystemPort
from kvblend.api.server.tenants import Caller

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
REQUEST_ID = b"x-request-id"
Handle = Callable[["Api", Request], Awaitable[ASGIApp]]
FindApi = Callable[[Scope], "Api"]


@dataclass(slots=True)
class Api:
    """What the routes work with, for one caller. `runs` are responses under way by id, `tasks` those in background."""

    system: SystemPort
    limits: ApiLimits
    gate: Gate
    kept: KeptResponses
    caller: Caller
    started_at: int
    runs: dict[str, Run] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Visit:
    """An HTTP exchange as the gate counts it: it ends by itself, so it needs no asking."""

    def finish(self) -> None:
        """Nothing: what runs here is drained with the system."""


class Endpoint:
    """A route over `handle(api, request)`, which returns the answer or raises RequestError. `find` gives the api.

    `counted` routes occupy the engine: they are refused while the server drains or has too many connections.
    """

    def __init__(self, find: FindApi, handle: Handle, *, counted: bool = False) -> None:
        self._find = find
        self._handle = handle
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange; whatever goes wrong before the answer began becomes an error answer."""
        api, visit = self._find(scope), Visit()
        try:
            try:
                if self._counted:
                    api.gate.check()
                    api.gate.enter(visit)
                answer = await self._handle(api, Request(scope, receive))
            except RequestError as error:
                answer = error_response(error)
            except ClientGone:
                return
            except Exception:
                _log.exception("%s %s failed", scope["method"], scope["path"])
                answer = error_response(RequestError("internal", "the request failed here; see the server's log"))
            try:
                await answer(scope, receive, send)
            except ClientGone:
                return
        finally:
            api.gate.leave(visit)


class Envelope:
    """Around the whole application: echoes `X-Request-Id` or makes one up, and refuses pages of foreign origin."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app: ASGIApp = app
        self._origins = origins
        if origins:
            methods = ("GET", "POST", "DELETE")
            self._app = CORSMiddleware(app, list(origins), methods, ["*"], expose_headers=[REQUEST_ID.decode()])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; only HTTP is touched, a WebSocket's origin is checked where it is accepted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(REQUEST_ID, b"").decode("latin-1")
        own = (given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}").encode()
        origin = headers.get(b"origin", b"").decode("latin-1")

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, own)]
            await send(message)

        if origin and origin not in self._origins and not _is_same(origin, headers):
            error = RequestError("forbidden", f"origin {origin[:80]!r} is not listed")
            await error_response(error)(scope, receive, answer)
        else:
            await self._app(scope, receive, answer)


def _is_same(origin: str, headers: dict[bytes, bytes]) -> bool:
    """Whether a page of this server speaks, as `/docs` does."""
    return origin.partition("://")[2].encode("latin-1") == headers.get(b"host", b"\0")


async def refuse_route(_request: Request, error: Exception) -> Any:
    """No such route, or not with this method, in the shape of all errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = _request.url.path[:120]
    if status == 405:
        answer = error_response(RequestError("method_not_allowed", f"{path} does not take {_request.method[:16]}"))
        if isinstance(error, HTTPException) and error.headers:
            answer.headers.update(error.headers)
        return answer
    return error_response(RequestError("not_found", f"there is no {path} here"))
