"""The OpenAPI document of the HTTP routes."""

from __future__ import annotations

from typing import Any

from kvblend.actors.errors import STATUS_BY_CODE
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.schemas import build_schemas

_SSE = "text/event-stream"
# method, path, what it does, the schema of its body, whether it can be streamed
_OPERATIONS: tuple[tuple[str, str, str, str, bool], ...] = (
    ("post", "/v1/chat/completions", "Answer a conversation, over documents if there are any.", "ChatCompletion", True),
    ("post", "/v1/completions", "Continue a plain prompt: text or token ids, one or several.", "Completion", True),
    ("post", "/v1/responses", "Create a response: whole, as events, or in the background.", "Response", True),
    ("get", "/v1/responses/{response_id}", "A response by its id, or its events behind one of them.", "", True),
    ("delete", "/v1/responses/{response_id}", "Forget a response; one that runs is cancelled.", "", False),
    ("post", "/v1/responses/{response_id}/cancel", "Cancel a response that runs.", "", False),
    ("get", "/v1/models", "The model served, as a list.", "", False),
    ("get", "/v1/models/{model}", "The model served.", "", False),
    ("post", "/v1/chunks", "Store documents ahead of the questions; as events, with progress.", "Chunks", True),
    ("get", "/v1/chunks", "Stored chunks, page by page.", "", False),
    ("get", "/v1/chunks/{chunk_id}", "A stored chunk: its length and size.", "", False),
    ("delete", "/v1/chunks/{chunk_id}", "Delete a stored chunk.", "", False),
    ("get", "/health", "Whether the process lives.", "", False),
    ("get", "/ready", "Whether it can answer, and why not.", "", False),
)
_KEY = {"type": "http", "scheme": "bearer", "description": "Where the server was given keys; never for /health."}
_EVENTS = (
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
)
_PAGE = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
    {"name": "after", "in": "query", "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"}},
)


def describe(model: str, limits: ApiLimits) -> dict[str, Any]:
    """The document, OpenAPI 3.1, of a server of this model with these limits."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, schema, streams in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(method, path, summary, schema, streams)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvblend",
            "version": "1",
            "description": "OpenAI's HTTP interface over stored KV of documents, wherever they stand in the prompt.",
        },
        "paths": paths,
        "components": {"schemas": build_schemas(model, limits), "securitySchemes": {"key": _KEY}},
        "security": [{"key": []}, {}],
    }


def _operation(method: str, path: str, summary: str, schema: str, streams: bool) -> dict[str, Any]:
    name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
    kinds = ("application/json", _SSE) if streams else ("application/json",)
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": {kind: {} for kind in kinds}}}
    for status in sorted(set(STATUS_BY_CODE.values())) if path.startswith("/v1") else (503,):
        answers[str(status)] = _failure(status)
    operation: dict[str, Any] = {"operationId": f"{method}_{name}", "summary": summary, "responses": answers}
    parameters: list[dict[str, Any]] = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in path.split("/")
        if part.startswith("{")
    ]
    if (method, path) == ("get", "/v1/chunks"):
        parameters.extend(_PAGE)
    if (method, path) == ("get", "/v1/responses/{response_id}"):
        parameters.extend(_EVENTS)
    if parameters:
        operation["parameters"] = parameters
    if schema:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _failure(status: int) -> dict[str, Any]:
    codes = sorted(code for code, its in STATUS_BY_CODE.items() if its == status)
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": f"code {' or '.join(codes)}", "content": content}
