from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.format import KVShape
from kvblend.store.keys import ChunkKey
from kvblend.store.listing import first_behind
from kvblend.store.store import ChunkStore

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")


def keys(count: int) -> list[ChunkKey]:
    return [ChunkKey.of("print", "", (number,), (7, number)) for number in range(count)]


async def fill(store: ChunkStore, count: int) -> list[str]:
    for number, key in enumerate(keys(count)):
        await store.put(key, (7, number), [bytearray(SHAPE.layer_bytes(2))])
    return sorted(key.id for key in keys(count))


@pytest.mark.parametrize("on_disk", [True, False])
async def test_pages_follow_each_other_without_gap(tmp_path: Path, on_disk: bool) -> None:
    root = tmp_path / "kv" if on_disk else None
    async with await ChunkStore.open(root, SHAPE, "print", 1 << 20) as store:
        names = await fill(store, 5)
        found: list[str] = []
        while page := await store.page(found[-1] if found else "", 2):
            found += [chunk.id for chunk in page]
        assert found == names


async def test_length_and_size_are_told(tmp_path: Path) -> None:
    async with await ChunkStore.open(tmp_path / "kv", SHAPE, "print", 1 << 20) as store:
        names = await fill(store, 1)
        found = await store.find(names[0])
        file = next((tmp_path / "kv").rglob(f"*{names[0]}*"))
    assert found is not None
    assert (found.num_tokens, found.num_bytes) == (2, file.stat().st_size)


async def test_a_chunk_in_memory_only_has_its_bytes() -> None:
    async with await ChunkStore.open(None, SHAPE, "print", 1 << 20) as store:
        names = await fill(store, 1)
        found = await store.find(names[0])
    assert found is not None
    assert found.num_bytes == SHAPE.layer_bytes(2)


@pytest.mark.parametrize("name", ["", "zz", "0" * 64])
async def test_what_is_not_there_is_not_found(name: str) -> None:
    async with await ChunkStore.open(None, SHAPE, "print", 1 << 20) as store:
        assert await store.find(name) is None


async def test_a_chunk_that_goes_while_a_page_is_made_is_left_out() -> None:
    async with await ChunkStore.open(None, SHAPE, "print", 1 << 20) as store:
        names = await fill(store, 3)
        listing = asyncio.create_task(store.page("", 10))
        await asyncio.sleep(0)
        await store.delete(names[0])
        assert {chunk.id for chunk in await listing} >= set(names[1:])


@given(st.sets(st.binary(min_size=1, max_size=2)), st.binary(max_size=2), st.integers(0, 5))
def test_the_smallest_behind_are_chosen(digests: set[bytes], after: bytes, limit: int) -> None:
    assert first_behind(digests, after, limit) == sorted(d for d in digests if d > after)[:limit]
