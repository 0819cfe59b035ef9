"""All HTTP routes with their handlers, in one table."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai import chunks, completions, responses
from kvblend.api.server.openai.document import describe
from kvblend.api.server.openai.endpoint import Api, Endpoint, FindApi, Handle
from kvblend.api.server.openai.metrics import CONTENT_TYPE, Metrics
from kvblend.api.server.openai.pages import render

# method, path, handler, whether it occupies the engine
TABLE: tuple[tuple[str, str, Handle, bool], ...] = (
    ("POST", "/v1/chat/completions", completions.chat, True),
    ("POST", "/v1/completions", completions.text, True),
    ("GET", "/v1/models", completions.models, False),
    ("GET", "/v1/models/{model:path}", completions.model, False),
    ("POST", "/v1/responses", responses.create, True),
    ("GET", "/v1/responses/{response_id}", responses.retrieve, False),
    ("DELETE", "/v1/responses/{response_id}", responses.forget, False),
    ("POST", "/v1/responses/{response_id}/cancel", responses.cancel, False),
    ("POST", "/v1/chunks", chunks.ingest, True),
    ("GET", "/v1/chunks", chunks.listing, False),
    ("GET", "/v1/chunks/{chunk_id}", chunks.retrieve, False),
    ("DELETE", "/v1/chunks/{chunk_id}", chunks.delete, False),
)


def http_routes(model: str, limits: ApiLimits, find: FindApi, metrics: Metrics) -> list[BaseRoute]:
    """The routes of a server of this model; `find` has the state of the caller whose request it is."""
    document = describe(model, limits)
    page = render(document)

    async def metrics_text(api: Api, _request: Request) -> ASGIApp:
        api.caller.check_operator()
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(_api: Api, _request: Request) -> ASGIApp:
        return JSONResponse(document)

    async def docs(_api: Api, _request: Request) -> ASGIApp:
        return HTMLResponse(page)

    table = (
        *TABLE,
        ("GET", "/metrics", metrics_text, False),
        ("GET", "/openapi.json", openapi, False),
        ("GET", "/docs", docs, False),
    )
    return [
        Route(path, Endpoint(find, handle, counted=counted), methods=[method])
        for method, path, handle, counted in table
    ]
