"""Two keys before one tiny model: what the one has stored does not exist for the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from raw_http import RawAnswer, call
from small_system import TEXTS, running

from kvblend.actors.settings import tenant_salt
from kvblend.actors.system import System
from kvblend.api.server.keys import KeyRing, issue
from kvblend.api.server.serve import serve
from kvblend.store.keys import tenant_tag

(ALICE, ALICE_KEY), (BOB, BOB_KEY) = issue("alice"), issue("bob")


class World:
    def __init__(self, system: System, port: int) -> None:
        self.system, self.port = system, port

    async def __call__(self, key: str, method: str, path: str, body: Any = None) -> RawAnswer:
        return await call(self.port, method, path, body, {"Authorization": f"Bearer {key}"})

    async def store(self, key: str, *texts: str) -> list[dict[str, Any]]:
        answer = await self(key, "POST", "/v1/chunks", {"documents": [{"text": text} for text in texts]})
        assert answer.status == 200, answer.body
        data: list[dict[str, Any]] = answer.json["data"]
        return data

    async def ask(self, key: str, *documents: dict[str, str]) -> RawAnswer:
        body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 2, "documents": list(documents)}
        return await self(key, "POST", "/v1/chat/completions", body)

    async def listed(self, key: str) -> list[str]:
        return [chunk["id"] for chunk in (await self(key, "GET", "/v1/chunks")).json["data"]]


@contextlib.asynccontextmanager
async def opened(folder: Path, **changes: Any) -> AsyncIterator[World]:
    model = save_llama(folder / "tiny", num_hidden_layers=3, max_position_embeddings=2048)
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    options: dict[str, Any] = {"stop": stop, "handle_signals": False, "keys": KeyRing([ALICE, BOB])}
    options["on_listening"] = lambda _host, port: listening.set_result(port)
    async with running(model, store=folder / "kv", **changes) as system:
        task = asyncio.create_task(serve(system, "127.0.0.1", 0, **options))
        try:
            yield World(system, await listening)
        finally:
            stop.set()
            await task


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened(tmp_path) as made:
        yield made


async def test_another_tenants_chunks_are_not_listed_found_used_or_deleted(world: World) -> None:
    (mine,) = await world.store(ALICE_KEY, TEXTS[0])
    assert mine["id"] in await world.listed(ALICE_KEY)
    assert await world.listed(BOB_KEY) == []
    for method in ("GET", "DELETE"):
        theirs = await world(BOB_KEY, method, f"/v1/chunks/{mine['id']}")
        nobodys = await world(BOB_KEY, method, f"/v1/chunks/{'0' * 64}")
        assert theirs.status == nobodys.status == 404
        # the message names the id that was asked for, and nothing else differs
        assert {**theirs.error, "message": ""} == {**nobodys.error, "message": ""}
    assert (await world.ask(BOB_KEY, {"id": mine["id"]})).status == 404
    assert (await world.ask(ALICE_KEY, {"id": mine["id"]})).status == 200
    assert (await world(ALICE_KEY, "GET", f"/v1/chunks/{mine['id']}")).status == 200
    assert (await world(ALICE_KEY, "DELETE", f"/v1/chunks/{mine['id']}")).status == 200
    assert mine["id"] not in await world.listed(ALICE_KEY)


async def test_the_same_text_is_a_hit_for_its_tenant_only(world: World) -> None:
    (mine,) = await world.store(ALICE_KEY, TEXTS[0])
    bobs = (await world.ask(BOB_KEY, {"text": TEXTS[0]})).json
    alices = (await world.ask(ALICE_KEY, {"text": TEXTS[0]})).json
    assert (bobs["kvblend"]["chunk_hits"], bobs["kvblend"]["tokens_reused"]) == (0, 0)
    assert alices["kvblend"]["chunk_hits"] == 1
    await world.system.settle()
    (stored,) = await world.store(BOB_KEY, TEXTS[0])
    assert stored["id"] != mine["id"]


async def test_what_one_tenant_stores_is_new_though_another_has_it(world: World) -> None:
    await world.store(ALICE_KEY, TEXTS[0])
    assert [chunk["created"] for chunk in await world.store(BOB_KEY, TEXTS[0])] == [True]


async def test_two_tenants_that_store_one_text_at_once_each_compute_it(world: World) -> None:
    alices, bobs = await asyncio.gather(world.store(ALICE_KEY, TEXTS[0]), world.store(BOB_KEY, TEXTS[0]))
    assert (alices[0]["created"], bobs[0]["created"]) == (True, True)
    assert alices[0]["id"] != bobs[0]["id"]


async def test_a_tenants_quota_takes_its_own_chunks_only(tmp_path: Path) -> None:
    async with opened(tmp_path, tenant_bytes_max=300_000) as world:
        await world.store(BOB_KEY, TEXTS[0])
        bobs = await world.listed(BOB_KEY)
        for text in TEXTS:
            await world.store(ALICE_KEY, text)
        assert await world.listed(BOB_KEY) == bobs
        alice = world.system.store_stats().tenants[tenant_tag(tenant_salt("", ALICE.id))]
        assert alice.evictions >= 1
        assert alice.disk_bytes <= 300_000
