"""`POST /v1/chat/completions`, `POST /v1/completions`, `GET /v1/models`."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvblend.actors.errors import RequestError
from kvblend.api.server.fields import show
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.answers import Asked, answer
from kvblend.api.server.openai.bodies import parse_chat, parse_text
from kvblend.api.server.openai.endpoint import Api
from kvblend.api.server.openai.exchange import read_json
from kvblend.api.server.openai.shapes import ChatShape, Shape, TextShape

Parse = Callable[[object, str, str, ApiLimits], Asked]


async def chat(api: Api, request: Request) -> ASGIApp:
    """Answer a conversation."""
    return await _complete(api, request, ChatShape(), parse_chat)


async def text(api: Api, request: Request) -> ASGIApp:
    """Continue one prompt or several."""
    return await _complete(api, request, TextShape(), parse_text)


async def _complete(api: Api, request: Request, shape: Shape, parse: Parse) -> ASGIApp:
    body = await read_json(request, api.limits)
    call_id = f"{shape.prefix}{secrets.token_hex(16)}"
    asked = parse(body, call_id, api.system.model, api.limits)
    return await answer(api.system, asked, shape, call_id, request, api.limits.ping_s)


async def models(api: Api, _request: Request) -> ASGIApp:
    """The one model served, as a list."""
    return JSONResponse({"object": "list", "data": [_model(api)]})


async def model(api: Api, request: Request) -> ASGIApp:
    """The model of this name. RequestError `not_found` for any other."""
    name = request.path_params["model"]
    if name != api.system.model:
        raise RequestError("not_found", f"model {show(name)} is not served here; served: {api.system.model}", "model")
    return JSONResponse(_model(api))


def _model(api: Api) -> dict[str, object]:
    return {"id": api.system.model, "object": "model", "created": api.started_at, "owned_by": "kvblend"}
