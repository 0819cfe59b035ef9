"""`/v1/chunks`: storing, listing, looking, deleting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_http import call

from kvblend.actors.messages import ChunkInfo, Failed, Generate
from kvblend.actors.streams import TokenStream
from tests.api.scripted import ScriptedSystem, Server, hold, serving

PATH = "/v1/chunks"
DOCUMENTS = [{"text": "a b"}, {"title": "t", "text": "c"}]
NAMES = [f"{number:064x}" for number in range(5)]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    system = ScriptedSystem()
    system.library.chunks = {name: ChunkInfo(name, 7, 100) for name in NAMES}
    async with serving(system) as running:
        yield running


async def test_documents_are_stored_in_order(server: Server) -> None:
    body = (await call(server.port, "POST", PATH, {"documents": DOCUMENTS, "system": "s"})).json
    assert [(chunk["id"], chunk["tokens"], chunk["created"]) for chunk in body["data"]] == [
        ("chunk-0", 2, True),
        ("chunk-1", 1, True),
    ]
    assert (server.system.requests[0].system, server.system.requests[0].generate) == ("s", False)


async def test_progress_is_told_on_the_way(server: Server) -> None:
    answer = await call(server.port, "POST", PATH, {"chunks": DOCUMENTS, "stream": True})
    first, *_, last, done = answer.frames
    assert (first["object"], last["object"], done) == ("chunks.progress", "list", "[DONE]")
    progress = [(frame["done"], frame["total"]) for frame in answer.frames if "done" in frame]
    assert progress[-1] == (2, 2)


async def test_a_failure_ends_the_stream_with_an_error() -> None:
    async def fail(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Failed(request.request_id, "internal", "the disk is full"))

    async with serving(ScriptedSystem(fail)) as server:
        frames = (await call(server.port, "POST", PATH, {"documents": DOCUMENTS, "stream": True})).frames
        whole = await call(server.port, "POST", PATH, {"documents": DOCUMENTS})
    assert [frame if isinstance(frame, str) else frame["error"]["message"] for frame in frames] == [
        "the disk is full",
        "[DONE]",
    ]
    assert whole.status == 500


async def test_a_server_that_stops_says_so_in_the_stream() -> None:
    system = ScriptedSystem(hold)
    async with serving(system) as server:
        asking = asyncio.create_task(call(server.port, "POST", PATH, {"documents": DOCUMENTS, "stream": True}))
        await system.until(lambda: system.running == 1)
        server.stop.set()
        assert (await asking).frames[-2]["error"]["code"] == "overloaded"


async def test_all_chunks_are_listed_page_by_page(server: Server) -> None:
    found: list[str] = []
    query = "?limit=2"
    while True:
        page = (await call(server.port, "GET", PATH + query)).json
        found += [chunk["id"] for chunk in page["data"]]
        if not page["has_more"]:
            break
        query = f"?limit=2&after={page['last_id']}"
    assert found == NAMES


async def test_a_chunk_is_found_and_deleted(server: Server) -> None:
    path = f"{PATH}/{NAMES[1]}"
    assert (await call(server.port, "GET", path)).json == {"id": NAMES[1], "object": "chunk", "tokens": 7, "bytes": 100}
    assert (await call(server.port, "DELETE", path)).json["deleted"] is True
    for method in ("GET", "DELETE"):
        answer = await call(server.port, method, path)
        assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize("name", ["x", "%2e%2e", "A" * 64, "0" * 63])
async def test_what_is_no_id_is_not_found(server: Server, name: str) -> None:
    assert (await call(server.port, "GET", f"{PATH}/{name}")).status == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("after=zz", "after"), ("page=1", "page")],
)
async def test_a_bad_parameter_is_named(server: Server, query: str, param: str) -> None:
    answer = await call(server.port, "GET", f"{PATH}?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": [{"text": 3}]}, "documents[0].text"),
        ({"documents": DOCUMENTS, "system": 3}, "system"),
        ({"documents": DOCUMENTS, "messages": []}, "messages"),
        ({"documents": DOCUMENTS, "chunks": DOCUMENTS}, "chunks"),
    ],
)
async def test_a_bad_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = await call(server.port, "POST", PATH, fields)
    assert (answer.status, answer.error["param"]) == (400, param)
