"""SIGTERM and SIGKILL on a real `kvblend serve` under load."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from raw_http import RawAnswer, call, parse_answer, request_bytes
from serve_process import ServeProcess, run, served
from small_system import TEXTS

from kvblend.api.client import AsyncClient, ConnectionLost, Generation, ServerBusy

pytestmark = pytest.mark.timeout(300)
GRACE = ("--drain-grace-s", "120")
# no answer may end before the test has asked all that it asks of a server that ends
LONG: dict[str, Any] = {"max_tokens": 700, "ignore_eos": True, "temperature": 1.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4, max_position_embeddings=2048)


class Ask:
    """One long answer over the WebSocket; `begun` is set with its first text."""

    def __init__(self, client: AsyncClient, number: int) -> None:
        self.begun = asyncio.Event()
        self.run: Generation = client.generate(f"question {number}?", documents=TEXTS[:2], seed=number, **LONG)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> str:
        async for _ in self.run:
            if self.run.text_so_far:
                self.begun.set()
        self.begun.set()
        return self.run.text_so_far


class Chat:
    """One long answer as server-sent events; `begun` is set with its first frame."""

    def __init__(self, port: int, number: int) -> None:
        messages = [{"role": "user", "content": f"question {number}?"}]
        self.body = {"messages": messages, "stream": True, "seed": number, **LONG}
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(port))

    async def _read(self, port: int) -> RawAnswer:
        data = json.dumps(self.body).encode()
        head = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request_bytes("POST", "/v1/chat/completions", data, head))
            first = await reader.readuntil(b"data: ")
            self.begun.set()
            return parse_answer(first + await reader.read(-1))
        finally:
            self.begun.set()
            writer.close()
            await writer.wait_closed()


async def refused_over_http(server: ServeProcess) -> None:
    """Ask until it is refused; what slips in before the signal is noticed is answered."""
    body = {"messages": [{"role": "user", "content": "late?"}], "max_tokens": 1}
    while (answer := await call(server.port, "POST", "/v1/chat/completions", body)).status == 200:
        pass
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) > 0


async def refused_over_websocket(client: AsyncClient) -> None:
    async def ask_on() -> None:
        while True:
            await client.generate("late?", max_tokens=1).text()

    with pytest.raises(ServerBusy, match="shutting down"):
        await ask_on()


async def test_a_term_under_load_loses_no_accepted_stream(model: Path, tmp_path: Path) -> None:
    async with served(model, tmp_path / "kv", *GRACE) as server, AsyncClient(server.url) as client:
        asks = [Ask(client, number) for number in range(12)]
        chats = [Chat(server.port, number) for number in range(4)]
        everyone: list[Ask | Chat] = [*asks, *chats]
        for one in everyone:
            await one.begun.wait()
        server.send(signal.SIGTERM)
        await refused_over_http(server)
        await refused_over_websocket(client)
        running = sum(not one.task.done() for one in everyone)
        await asyncio.gather(*(ask.task for ask in asks))
        streamed = await asyncio.gather(*(chat.task for chat in chats))
        assert await server.wait(120) == 0
    assert running > 0
    assert {ask.run.result.reason for ask in asks} <= {"stop", "length"}
    for answer in streamed:
        assert answer.frames[-1] == "[DONE]"
        assert answer.frames[-2]["choices"][0]["finish_reason"] in ("stop", "length")


async def ingest_until_lost(client: AsyncClient, stored: list[str], enough: asyncio.Event) -> None:
    """Store ever new texts; `stored` has those the server said are durable, `enough` is set when they are six."""
    for number in range(10_000):
        text = f"number {number}: {TEXTS[number % len(TEXTS)]}"
        await client.ingest([text])
        stored.append(text)
        if len(stored) == 6:
            enough.set()


async def test_a_kill_is_a_clear_error_and_leaves_the_store_whole(model: Path, tmp_path: Path) -> None:
    store, stored, enough = tmp_path / "kv", list[str](), asyncio.Event()
    async with served(model, store) as server, AsyncClient(server.url) as client:
        ingesting = asyncio.create_task(ingest_until_lost(client, stored, enough))
        asks = [Ask(client, number) for number in range(6)]
        for ask in asks:
            await ask.begun.wait()
        await enough.wait()
        server.send(signal.SIGKILL)
        ends = await asyncio.gather(ingesting, *(ask.task for ask in asks), return_exceptions=True)
        assert await server.wait() == -signal.SIGKILL
        with pytest.raises(ConnectionLost, match="cannot connect"):
            await client.generate("anybody?").text()
    assert isinstance(ends[0], ConnectionLost)
    # an answer that ended before the kill is whole; any other says that its connection was lost
    assert all(isinstance(end, str | ConnectionLost) for end in ends[1:])
    code, said = await run("store", "check", "--store", str(store))
    assert code == 0, said
    async with served(model, store) as again, AsyncClient(again.url) as client:
        answer = client.generate("who held the key?", documents=stored[-4:], max_tokens=2)
        await answer.text()
        assert (answer.result.usage.chunk_hits, answer.result.usage.chunk_misses) == (4, 0)
        again.send(signal.SIGTERM)
        assert await again.wait() == 0
