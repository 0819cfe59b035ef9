from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from kvblend.actors.messages import Document, Finished, Generate, SelectionOptions, StoredChunk
from kvblend.actors.streams import TokenStream
from kvblend.api.client import AsyncClient, ConnectionLost, GenerationFailed, RequestRefused
from kvblend.api.client.client import BATCH_CHARS_MAX, BATCH_DOCUMENTS_MAX, split_batches
from kvblend.api.server.keys import KeyRing, issue
from tests.api.scripted import USAGE, ScriptedSystem, Server, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, timeout_s=20) as connected:
        yield connected


async def test_every_argument_of_generate_reaches_the_system(server: Server, client: AsyncClient) -> None:
    await client.generate(
        "what?",
        system="be brief",
        documents=["plain", {"title": "t", "text": "b"}, {"id": "abc"}, Document(text="d")],
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["\n", "END"],
        mode="reuse",
        recompute_ratio=0.3,
        divergence="kv",
        selector="query",
        residual="ridge",
        on_miss="precompute",
        blend={"check_layers": (1, 3)},
        deadline_ms=60_000,
    ).text()
    request = server.system.requests[0]
    assert request.messages[0].content == "what?"
    assert request.system == "be brief"
    assert request.documents == (
        Document("plain"),
        Document("b", "t"),
        Document(id="abc"),
        Document("d"),
    )
    sampling, blend = request.sampling, request.blend
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.seed, sampling.stop) == (3, ("\n", "END"))
    assert (blend.mode, blend.recompute_ratio, blend.on_miss) == ("reuse", 0.3, "precompute")
    assert blend.selection == SelectionOptions("query", check_layers=(1, 3), divergence="kv", residual="ridge")
    assert request.deadline_ms is not None
    assert 50_000 < request.deadline_ms <= 60_000


async def test_messages_keep_their_order_and_roles(server: Server, client: AsyncClient) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    turns += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    await client.generate(messages=turns).text()
    request = server.system.requests[0]
    assert [(m.role, m.content) for m in request.messages] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert request.system == "s"


async def test_ingest_returns_one_chunk_for_each_text(client: AsyncClient) -> None:
    stored = await client.ingest(["a b", {"title": "t", "text": "c"}], system="s")
    assert stored == [StoredChunk("chunk-0", 2, True), StoredChunk("chunk-1", 1, True)]


async def test_ingest_counts_progress_over_all_batches(server: Server, client: AsyncClient) -> None:
    seen: list[tuple[int, int]] = []
    total = BATCH_DOCUMENTS_MAX + 5
    stored = await client.ingest(["x"] * total, on_progress=lambda done, of: seen.append((done, of)))
    assert len(stored) == total
    assert len(server.system.requests) == 2
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


async def test_an_ingest_that_is_cut_short_fails(server: Server, client: AsyncClient) -> None:
    async def cancel(request: Generate, stream: TokenStream) -> None:
        stream.push_nowait(Finished(request.request_id, "cancelled", USAGE, detail="shutting down"))

    server.system.script = cancel
    with pytest.raises(GenerationFailed, match="shutting down"):
        await client.ingest(["x"])


async def test_an_unknown_model_is_refused_before_anything_runs(server: Server) -> None:
    async with AsyncClient(server.url, model="other") as client:
        with pytest.raises(RequestRefused, match="'other' is not served here") as caught:
            await client.generate("what?").text()
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert server.system.requests == []


async def test_health_and_ready(server: Server, client: AsyncClient) -> None:
    assert await client.health()
    assert (await client.ready())["model"] == "scripted"


async def test_a_closed_client_does_not_connect_again(server: Server) -> None:
    client = AsyncClient(server.url)
    await client.aclose()
    with pytest.raises(ConnectionLost, match="closed"):
        await client.generate("what?").text()


def test_batches_respect_their_size_and_lose_nothing() -> None:
    documents = [{"text": "x" * (BATCH_CHARS_MAX // 3)} for _ in range(7)]
    batches = list(split_batches(documents))
    assert [document for batch in batches for document in batch] == documents
    assert max(len(batch) for batch in batches) == 3


def test_the_client_loads_neither_torch_nor_a_server() -> None:
    code = (
        "import sys, kvblend; kvblend.AsyncClient; "
        "print([m for m in ('torch', 'starlette', 'uvicorn', 'numpy', 'aiofiles') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_neighbours_count_in_the_size_of_a_batch() -> None:
    documents = [{"text": "x", "behind": [{"text": "y" * (BATCH_CHARS_MAX // 3)}]} for _ in range(7)]
    assert [len(batch) for batch in split_batches(documents)] == [2, 2, 2, 1]


async def test_a_key_opens_a_server_that_wants_one() -> None:
    tenant, key = issue("alice")
    async with serving(ScriptedSystem(), keys=KeyRing([tenant])) as server:
        async with AsyncClient(server.url, timeout_s=20, api_key=key) as client:
            assert await client.generate("what?").text() == "one two three"
            assert (await client.ready())["ready"]
        assert [request.tenant for request in server.system.requests] == [tenant.id]


@pytest.mark.parametrize("key", [None, "kvb_wrong"])
async def test_without_the_right_key_it_is_refused(key: str | None) -> None:
    async with (
        serving(ScriptedSystem(), keys=KeyRing([issue("alice")[0]])) as server,
        AsyncClient(server.url, timeout_s=20, api_key=key) as client,
    ):
        assert await client.health()
        for asked in (client.generate("what?").text(), client.ready()):
            with pytest.raises(RequestRefused) as caught:
                await asked
            assert (caught.value.status, caught.value.code) == (401, "unauthorized")
            assert "API key" in str(caught.value)
            assert "kvb_wrong" not in str(caught.value)


@pytest.mark.parametrize("key", ["a\r\nX: y", "ä", " ", ""])
def test_a_key_that_no_header_may_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"^api_key must be printable ASCII characters$"):
        AsyncClient("ws://127.0.0.1:1", api_key=key)
