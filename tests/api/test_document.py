"""The OpenAPI document against the routes and the parsers it describes."""

from __future__ import annotations

import re
from typing import Any

from raw_http import call
from starlette.routing import Route

from kvblend.api.server.app import create_app
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.document import describe
from kvblend.api.server.openai.pages import render
from tests.api.scripted import ScriptedSystem, serving

DOCUMENT = describe("m<1>", ApiLimits())


async def test_it_has_every_route_and_no_other() -> None:
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in create_app(ScriptedSystem()).routes
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    pages = {("GET", "/metrics"), ("GET", "/docs"), ("GET", "/openapi.json")}
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == routes - pages


def test_every_reference_leads_somewhere() -> None:
    names = set(re.findall(r"#/components/schemas/(\w+)", repr(DOCUMENT)))
    assert names == set(DOCUMENT["components"]["schemas"])


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def test_a_path_names_its_parameters() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))


def test_the_page_escapes_what_it_shows() -> None:
    page = render(DOCUMENT)
    assert "m<1>" not in page
    assert "m&lt;1&gt;" in page
    assert "http://" not in page
    assert "https://" not in page


async def test_both_are_served() -> None:
    async with serving(ScriptedSystem()) as server:
        page = await call(server.port, "GET", "/docs")
        document: dict[str, Any] = (await call(server.port, "GET", "/openapi.json")).json
    assert page.headers["content-type"].startswith("text/html")
    assert (document["openapi"], document["info"]["title"]) == ("3.1.0", "kvblend")


def test_it_says_that_a_server_may_want_a_key() -> None:
    document = describe("m", ApiLimits())
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{"key": []}, {}]
