"""Before everything but `/health`: whose key a request has, and whether that caller may ask again yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvblend.actors.errors import RequestError
from kvblend.api.server.keys import read_token
from kvblend.api.server.openai.exchange import error_response
from kvblend.api.server.tenants import Caller, Callers

OPEN_PATHS = ("/health",)
# asked for by machines that look after the server, at a pace of their own
UNCOUNTED_PATHS = ("/ready", "/metrics")
_CALLER = "kvblend.caller"


class Guard:
    """Around the routes, so that no route can be forgotten. `on_refused` is told the code of each refusal."""

    def __init__(self, app: ASGIApp, callers: Callers, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._callers = callers
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on with the caller in the scope, or refuse: a WebSocket before its handshake."""
        kind, path = scope["type"], scope.get("path")
        if kind not in ("http", "websocket") or (kind == "http" and path in OPEN_PATHS):
            await self._app(scope, receive, send)
            return
        try:
            caller = self._callers.find(_token(scope))
            if path not in UNCOUNTED_PATHS:
                caller.allowance.count()
        except RequestError as error:
            self._on_refused(error.code)
            await error_response(error)(scope, receive, send)
            return
        await self._app({**scope, _CALLER: caller}, receive, send)


def caller_of(scope: Scope) -> Caller:
    """Who is behind a request that the guard has let pass."""
    caller = scope[_CALLER]
    if not isinstance(caller, Caller):
        raise TypeError("this route is not behind the guard")
    return caller


def _token(scope: Scope) -> str | None:
    headers: Any = scope["headers"]
    given = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
    return read_token(given, scope.get("subprotocols", ()))
