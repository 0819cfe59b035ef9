from __future__ import annotations

import pytest
from raw_http import call

from kvblend.api.server.openai.routes import TABLE
from tests.api.scripted import ScriptedSystem, serving


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, _, counted in TABLE if counted])
async def test_routes_that_occupy_the_engine_are_closed_while_it_drains(method: str, path: str) -> None:
    from kvblend.api.server.app import create_app
    from kvblend.api.server.gate import Gate
    from kvblend.api.server.limits import ApiLimits

    gate = Gate(ApiLimits())
    gate.close()
    app = create_app(ScriptedSystem(), gate=gate)
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "app": app}
    await app(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 503


async def test_head_is_as_good_as_get() -> None:
    async with serving(ScriptedSystem()) as server:
        assert (await call(server.port, "HEAD", "/v1/models")).status == 200
