from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvblend.actors.library import Library
from kvblend.actors.settings import tenant_salt
from kvblend.store.format import KVShape
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
IDS = tuple(range(5))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ChunkStore]:
    async with await ChunkStore.open(tmp_path / "kv", SHAPE, "print", 1 << 20) as opened:
        for number in range(3):
            key = ChunkKey.of("print", "", (number,), IDS)
            await opened.put(key, IDS, [bytearray(SHAPE.layer_bytes(len(IDS)))])
        yield opened


async def test_a_chunk_is_listed_found_and_deleted(store: ChunkStore) -> None:
    library = Library(store, "")
    page = await library.page("", 10)
    assert [chunk.tokens for chunk in page] == [5, 5, 5]
    assert [await library.find(chunk.id) for chunk in page] == page
    assert await library.delete(page[0].id)
    assert await library.find(page[0].id) is None
    assert await library.page("", 10) == page[1:]


async def test_figures_are_numbers(store: ChunkStore) -> None:
    figures = Library(store, "").figures()
    assert figures["chunks"] == 3
    assert figures["disk_bytes"] > 0


async def test_chunks_of_another_tenant_are_not_there(store: ChunkStore) -> None:
    name = (await Library(store, "").page("", 1))[0].id
    other = Library(store, "other")
    assert (await other.page("", 10), await other.find(name), await other.delete(name)) == ([], None, False)


async def test_a_tenant_sees_its_own_chunks_only(store: ChunkStore) -> None:
    key = ChunkKey.of("print", tenant_salt("s", "a"), (9,), IDS)
    await store.put(key, IDS, [bytearray(SHAPE.layer_bytes(len(IDS)))])
    library = Library(store, "s")
    assert [chunk.id for chunk in await library.of("a").page("", 10)] == [key.id]
    for other in (library, library.of("b"), Library(store, "").of("a")):
        assert await other.page("", 10) == []
        assert await other.find(key.id) is None
        assert not await other.delete(key.id)
    assert await library.of("a").delete(key.id)
