"""Chunks whose layers end with a float32 per token, beside chunks of K and V alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.store import ChunkDamaged, ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import Flip, Make, OpenStore, Sample

TOKENS = 5


def longer(one: Sample) -> Sample:
    """The chunk with a float32 per token behind K and V of each layer."""
    return replace(one, layers=[layer + bytes(range(4 * TOKENS)) for layer in one.layers])


async def read(store: ChunkStore, one: Sample) -> tuple[str, list[bytearray]] | None:
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return None
    with lease:
        return lease.tier, [bytearray(await lease.layer(index)) for index in range(len(one.layers))]


async def put(store: ChunkStore, *samples: Sample) -> None:
    for one in samples:
        assert await store.put(one.key, one.ids, one.layers)


@pytest.mark.parametrize("in_memory", [True, False])
async def test_chunks_of_both_lengths_are_served_from_memory(
    open_store: OpenStore, sample: Make, tmp_path: Path, in_memory: bool
) -> None:
    store = await open_store(None if in_memory else tmp_path)
    samples = [sample(0), longer(sample(1))]
    await put(store, *samples)
    assert [await read(store, one) for one in samples] == [("host", one.layers) for one in samples]


async def test_chunks_of_both_lengths_come_back_after_a_restart(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path)
    samples = [sample(0), longer(sample(1))]
    await put(store, *samples)
    before = store.stats()
    await store.close()
    store = await open_store(tmp_path)
    assert (store.stats().chunks, store.stats().disk_bytes, store.stats().damaged) == (2, before.disk_bytes, 0)
    assert [await read(store, one) for one in samples] == [("disk", one.layers) for one in samples]
    assert store.stats().bytes_read == sum(one.num_bytes for one in samples)


async def test_a_flipped_bit_behind_k_and_v_is_noticed(
    open_store: OpenStore, sample: Make, tmp_path: Path, flip_byte: Flip
) -> None:
    store = await open_store(tmp_path)
    one = longer(sample())
    await put(store, one)
    store.evict_nowait(one.key.id)
    path = one.path(tmp_path)
    flip_byte(path, path.read_bytes().rindex(bytes(one.layers[-1])) + len(one.layers[-1]) - 1)
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    with lease, pytest.raises(ChunkDamaged, match="checksum of layer 3"):
        await lease.layer(3)


async def test_the_host_budget_counts_what_stands_behind_k_and_v(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, budget=2 * sample().num_bytes)
    await put(store, sample(0), longer(sample(1)))
    stats = store.stats()
    assert (stats.host_chunks, stats.host_bytes, stats.evictions) == (1, longer(sample(1)).num_bytes, 1)


@pytest.mark.parametrize("more", [-1, 1, 4 * TOKENS + 1])
async def test_a_chunk_of_another_length_is_refused_and_not_kept(
    open_store: OpenStore, sample: Make, tmp_path: Path, more: int
) -> None:
    store = await open_store(tmp_path)
    one = sample()
    with pytest.raises(ValueError, match="it must have 320 or 340"):
        await store.put(one.key, one.ids, [bytes(320 + more)] * 4)
    assert not store.contains(one.key)
    assert not list((tmp_path / "chunks").rglob("*.kvc"))
