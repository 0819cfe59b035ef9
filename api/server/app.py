"""The application: `/health`, `/ready`, the WebSocket `/v1/responses`, and the HTTP routes beside them."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvblend.actors.errors import RequestError
from kvblend.api.server.codec import choose_codec
from kvblend.api.server.connection import Connection
from kvblend.api.server.gate import Gate
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.metering import MeteredSystem
from kvblend.api.server.openai.endpoint import Api, Envelope, refuse_route
from kvblend.api.server.openai.exchange import error_body
from kvblend.api.server.openai.kept import KeptResponses
from kvblend.api.server.openai.metrics import Metrics
from kvblend.api.server.openai.routes import http_routes
from kvblend.api.server.port import SystemPort

RESPONSES_PATH = "/v1/responses"


def create_app(
    system: SystemPort,
    limits: ApiLimits | None = None,
    gate: Gate | None = None,
    origins: Collection[str] = (),
) -> Starlette:
    """The application over a running system. A browser page may only connect if its Origin is in `origins`."""
    limits = ApiLimits() if limits is None else limits
    gate = Gate(limits) if gate is None else gate
    metrics = Metrics(system, gate)
    metered = MeteredSystem(system, metrics)

    async def health(_request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def ready(_request: Request) -> JSONResponse:
        state = system.ready()
        reasons = [*state.reasons, *(["the server is shutting down"] if gate.draining else [])]
        ok = state.ok and not gate.draining
        body = {"ready": ok, "reasons": reasons, "model": system.model, "details": dict(state.details)}
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
        await Connection(websocket, codec, metered, gate, limits).run()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            WebSocketRoute(RESPONSES_PATH, responses),
            *http_routes(Api(metered, limits, gate, KeptResponses(limits)), metrics),
        ],
        middleware=[Middleware(Envelope, origins=origins)],
        exception_handlers={HTTPException: refuse_route},
    )


def _check_origin(websocket: WebSocket, origins: Collection[str]) -> None:
    origin = websocket.headers.get("origin")
    if origin is not None and origin not in origins:
        raise RequestError("forbidden", f"origin {origin!r} is not listed")


async def _deny(websocket: WebSocket, error: RequestError) -> None:
    """Refuse before the handshake, with a plain HTTP answer."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(ceil(error.retry_after_s))}
    body = error_body(error)
    await websocket.send_denial_response(JSONResponse(body, status_code=error.status, headers=headers))
