"""The unmodified `openai` package against a live server: scripted, and a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from model_files import save_llama
from openai import AsyncOpenAI
from small_system import TEXTS, running

from kvblend.actors.errors import RequestError
from kvblend.api.server.keys import KeyRing, issue
from kvblend.api.server.port import SystemPort
from kvblend.api.server.serve import serve
from tests.api.scripted import ScriptedSystem, hold, serving

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]


def connect(port: int) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=30)


@pytest.fixture
async def client() -> AsyncIterator[AsyncOpenAI]:
    async with serving(ScriptedSystem()) as server, connect(server.port) as made:
        yield made


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["scripted"]
    assert (await client.models.retrieve("scripted")).owned_by == "kvblend"


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == "one two three"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 60


async def test_chat_streamed(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "one two three"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 103


async def test_completions(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model="scripted", prompt=["a", "b"])
    stream = await client.completions.create(model="scripted", prompt=[1, 2, 3], stream=True)
    assert [choice.text for choice in whole.choices] == ["one two three"] * 2
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two three"


async def test_responses(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="scripted", input="what?", metadata={"a": "b"})
    assert (response.output_text, response.status, response.metadata) == ("one two three", "completed", {"a": "b"})
    assert (await client.responses.retrieve(response.id)).output_text == "one two three"
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_responses_streamed(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="scripted", input="what?") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == "one two three"
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens == 60


async def test_a_response_in_the_background_is_cancelled() -> None:
    async with serving(ScriptedSystem(hold)) as server, connect(server.port) as client:
        response = await client.responses.create(model="scripted", input="what?", background=True)
        assert response.status == "in_progress"
        assert (await client.responses.cancel(response.id)).status == "cancelled"


async def test_responses_over_a_websocket(client: AsyncOpenAI) -> None:
    async with client.responses.connect(max_retries=0) as connection:
        for lane in ("a", "b"):
            await connection.response.create(model="scripted", input="what?", max_output_tokens=8, stream_id=lane)
        ended = 0
        async with asyncio.timeout(30):
            async for event in connection:
                if event.type == "response.completed":
                    assert event.response.output_text == "one two three"
                    ended += 1
                    if ended == 2:
                        break


async def test_errors_arrive_as_the_clients_own() -> None:
    system = ScriptedSystem()
    async with serving(system) as server, connect(server.port) as client:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="scripted", messages=MESSAGES, n=2)
        system.refusal = RequestError("rate_limited", "slow down", retry_after_s=1.0)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert (refused.value.param, refused.value.code) == ("n", "invalid_request")


async def test_leaving_a_stream_cancels_the_request() -> None:
    system = ScriptedSystem(hold)
    async with serving(system) as server, connect(server.port) as client:
        stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        async with stream:
            await anext(aiter(stream))
        async with asyncio.timeout(30):
            await system.until(lambda: len(system.abandoned) == 1)


@contextlib.asynccontextmanager
async def served(system: SystemPort) -> AsyncIterator[AsyncOpenAI]:
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    options: dict[str, Any] = {"stop": stop, "handle_signals": False}
    options["on_listening"] = lambda _host, port: listening.set_result(port)
    task = asyncio.create_task(serve(system, "127.0.0.1", 0, **options))
    try:
        async with connect(await listening) as client:
            yield client
    finally:
        stop.set()
        await task


async def test_a_tiny_model_reuses_chunks_in_another_order(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "tiny", num_hidden_layers=4, max_position_embeddings=2048)
    documents = [{"text": text} for text in TEXTS]
    async with running(model, store=tmp_path / "kv") as system, served(system) as client:

        async def ask(order: list[dict[str, str]], **fields: Any) -> Any:
            extra = {"documents": order, "blend": {"mode": "blend"}}
            return await client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, extra_body=extra, **fields
            )

        await ask(documents)
        await system.settle()
        second = await ask(documents[::-1])
        assert second.kvblend["chunk_hits"] == len(TEXTS)
        assert second.usage.prompt_tokens_details.cached_tokens > 0.5 * second.usage.prompt_tokens
        await system.settle()
        stream = await ask(documents[::-1], stream=True)
        streamed = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        assert streamed == (await ask(documents[::-1])).choices[0].message.content
        chunks: Any = await client.get("/chunks", cast_to=object)
        name = max(chunks["data"], key=lambda chunk: chunk["tokens"])["id"]
        assert (await client.get(f"/chunks/{name}", cast_to=object))["bytes"] > 0  # type: ignore[index]
        await client.delete(f"/chunks/{name}", cast_to=object)
        with pytest.raises(openai.NotFoundError):
            await client.get(f"/chunks/{name}", cast_to=object)


async def test_its_key_is_the_servers() -> None:
    tenant, key = issue("alice")
    async with serving(ScriptedSystem(), keys=KeyRing([tenant])) as server:
        async with connect(server.port) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with connect(server.port).with_options(api_key=key) as client:
            answer = await client.chat.completions.create(model="scripted", messages=MESSAGES)
            assert answer.choices[0].message.content == "one two three"
            async with client.responses.connect(max_retries=0) as socket, asyncio.timeout(30):
                await socket.response.create(model="scripted", input="what?")
                async for event in socket:
                    assert event.type != "error"
                    if event.type == "response.completed":
                        break
