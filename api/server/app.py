"""The application: `/health`, `/ready`, the WebSocket `/v1/responses`, and the HTTP routes beside them."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvblend.actors.errors import RequestError
from kvblend.api.server.codec import choose_codec
from kvblend.api.server.connection import Connection
from kvblend.api.server.gate import Gate
from kvblend.api.server.guard import Guard, caller_of
from kvblend.api.server.keys import KeyRing
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.metering import MeteredSystem
from kvblend.api.server.openai.endpoint import Api, Envelope, refuse_route
from kvblend.api.server.openai.exchange import error_response
from kvblend.api.server.openai.kept import KeptResponses
from kvblend.api.server.openai.metrics import Metrics
from kvblend.api.server.openai.routes import http_routes
from kvblend.api.server.port import SystemPort
from kvblend.api.server.rates import Clock, RateLimits
from kvblend.api.server.tenants import Caller, Callers, TenantSystem

RESPONSES_PATH = "/v1/responses"


def create_app(
    system: SystemPort,
    limits: ApiLimits | None = None,
    gate: Gate | None = None,
    origins: Collection[str] = (),
    keys: KeyRing | None = None,
    rates: RateLimits | None = None,
    clock: Clock | None = None,
) -> Starlette:
    """The application over a running system. A browser page may only connect if its Origin is in `origins`.

    With `keys` everything but `/health` wants one, and each key's chunks and responses are its own. `rates` are of each
    key, in the time of `clock` (the monotonic one).
    """
    limits = ApiLimits() if limits is None else limits
    gate = Gate(limits) if gate is None else gate
    metrics = Metrics(system, gate)
    callers = Callers(keys, rates or RateLimits(), clock)
    desks = _Desks(system, limits, gate, metrics)

    def count_refusal(code: str) -> None:
        metrics.failed.labels(code).inc()

    async def health(_request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> JSONResponse:
        state = system.ready()
        reasons = [*state.reasons, *(["the server is shutting down"] if gate.draining else [])]
        ok = state.ok and not gate.draining
        # counts of the store and the like are of all tenants together
        details = dict(state.details) if caller_of(request.scope).operator else {}
        body = {"ready": ok, "reasons": reasons, "model": system.model, "details": details}
        return JSONResponse(body, status_code=200 if ok else 503)

    async def responses(websocket: WebSocket) -> None:
        try:
            _check_origin(websocket, origins)
            gate.check()
            subprotocol, codec = choose_codec(list(websocket.scope["subprotocols"]))
        except RequestError as error:
            await _deny(websocket, error)
            return
        try:
            await websocket.accept(subprotocol)
        except WebSocketDisconnect:
            return
        own = desks.system_of(caller_of(websocket.scope), counted=True)
        await Connection(websocket, codec, own, gate, limits, desks.find(websocket.scope).kept).run()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            WebSocketRoute(RESPONSES_PATH, responses),
            *http_routes(system.model, limits, desks.find, metrics),
        ],
        middleware=[
            Middleware(Envelope, origins=origins),
            Middleware(Guard, callers=callers, on_refused=count_refusal),
        ],
        exception_handlers={HTTPException: refuse_route},
    )


class _Desks:
    """What the routes work with, for each caller."""

    def __init__(self, system: SystemPort, limits: ApiLimits, gate: Gate, metrics: Metrics) -> None:
        self._system = system
        self._limits = limits
        self._gate = gate
        self._metrics = metrics
        self._started_at = int(time.time())
        self._apis: dict[str, Api] = {}

    def system_of(self, caller: Caller, *, counted: bool, peer: str = "") -> MeteredSystem:
        """The system as this caller sees it; `counted` and `peer` as for `TenantSystem`."""
        return MeteredSystem(TenantSystem(self._system, caller, counted=counted, peer=peer), self._metrics)

    def find(self, scope: Scope) -> Api:
        """The state of the caller whose HTTP request this is."""
        caller = caller_of(scope)
        api = self._apis.get(caller.tenant_id)
        if api is None:
            own, kept = self.system_of(caller, counted=False), KeptResponses(self._limits)
            api = Api(own, self._limits, self._gate, kept, caller, self._started_at)
        elif api.caller is not caller:
            # the tenant has a new key: what runs for it goes on
            api = replace(api, system=self.system_of(caller, counted=False), caller=caller)
        self._apis[caller.tenant_id] = api
        if caller.tenant is None:
            # all of them have one caller's state, but each address its own share of the server
            return replace(api, system=self.system_of(caller, counted=False, peer=_peer_of(scope)))
        return api


def _peer_of(scope: Scope) -> str:
    """The address of the other end; its port says nothing, an HTTP client has many."""
    client = scope.get("client")
    return f"http-{client[0]}" if client else ""


def _check_origin(websocket: WebSocket, origins: Collection[str]) -> None:
    origin = websocket.headers.get("origin")
    if origin is not None and origin not in origins:
        raise RequestError("forbidden", f"origin {origin!r} is not listed")


async def _deny(websocket: WebSocket, error: RequestError) -> None:
    """Refuse before the handshake, with a plain HTTP answer."""
    await websocket.send_denial_response(error_response(error))
