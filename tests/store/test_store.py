from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.errors import StoreUnusable, StoreWriteFailed
from kvblend.store.format import KVShape
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample


async def put(store: ChunkStore, *samples: Sample) -> list[bool]:
    return [await store.put(one.key, one.ids, one.layers) for one in samples]


async def read(store: ChunkStore, one: Sample) -> tuple[str, list[bytearray]] | None:
    """The tier and all layers of a chunk, or None for a miss."""
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return None
    with lease:
        await lease.prefetch(range(len(one.layers)))
        return lease.tier, [bytearray(await lease.layer(index)) for index in range(len(one.layers))]


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_stored_chunk_is_served_hot(
    open_store: OpenStore, sample: Make, tmp_path: Path, in_memory: bool
) -> None:
    store = await open_store(None if in_memory else tmp_path)
    assert await put(store, sample(), sample()) == [True, False]
    assert store.contains(sample().key)
    assert await read(store, sample()) == ("host", sample().layers)


async def test_an_unknown_chunk_is_a_miss(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    assert not store.contains(sample().key)
    assert await read(store, sample()) is None
    assert store.stats().misses == 1


async def test_an_evicted_chunk_comes_from_disk_once(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    assert store.evict_nowait(sample().key.id)
    assert await read(store, sample()) == ("disk", sample().layers)
    assert await read(store, sample()) == ("host", sample().layers)


async def test_a_restart_serves_what_was_stored(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample(0), sample(1))
    await store.close()
    store = await open_store(tmp_path)
    assert store.stats().chunks == 2
    assert await read(store, sample(1)) == ("disk", sample(1).layers)


async def test_hot_buffers_are_those_handed_in(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store, one = await open_store(tmp_path), sample()
    await put(store, one)
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    with lease:
        assert (await lease.layer(2)).obj is one.layers[2]


@pytest.mark.parametrize("in_memory", [True, False])
async def test_read_only_buffers_are_copied(
    open_store: OpenStore, sample: Make, tmp_path: Path, in_memory: bool
) -> None:
    store, one = await open_store(None if in_memory else tmp_path), sample()
    await store.put(one.key, one.ids, [bytes(layer) for layer in one.layers])
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    with lease:
        assert not (await lease.layer(2)).readonly


async def test_variants_of_a_chunk_are_kept_apart(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store, one = await open_store(tmp_path), sample()
    await put(store, one)
    for salt, conditioning in (("other", (1, 2)), ("", ()), ("", (1, 3))):
        assert not store.contains(ChunkKey.of("model-a", salt, conditioning, one.ids))


async def test_other_token_ids_under_a_key_are_a_miss(
    open_store: OpenStore, sample: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, one = await open_store(tmp_path), sample()
    await put(store, one)
    assert await store.lease(one.key, (*one.ids[:-1], 9)) is None
    assert "other token ids" in caplog.text
    assert store.stats().leases == store.stats().pinned_bytes == 0


async def test_arguments_that_contradict_each_other_are_refused(open_store: OpenStore, sample: Make) -> None:
    store, one = await open_store(None), sample()
    with pytest.raises(ValueError, match="layers has 3 entries"):
        await store.put(one.key, one.ids, one.layers[:3])
    with pytest.raises(ValueError, match=r"key\.content"):
        await store.put(one.key, one.ids[:-1], one.layers)
    with pytest.raises(ValueError, match="token id 0 is -1"):
        await store.lease(one.key, (-1,))


async def test_token_ids_are_found_by_public_id(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    assert await store.token_ids(sample().key.id) == sample().ids
    store.evict_nowait(sample().key.id)
    assert await store.token_ids(sample().key.id) == sample().ids


@pytest.mark.parametrize("bad", ["", "../../etc/passwd", "A" * 64, "0" * 64])
async def test_unknown_and_malformed_ids_are_none(open_store: OpenStore, tmp_path: Path, bad: str) -> None:
    store = await open_store(tmp_path)
    assert await store.token_ids(bad) is None
    assert await store.delete(bad) is False
    assert store.evict_nowait(bad) is False


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_tenant_can_neither_see_nor_touch_anothers_chunk_by_its_id(
    open_store: OpenStore, sample: Make, tmp_path: Path, in_memory: bool
) -> None:
    store = await open_store(None if in_memory else tmp_path)
    mine, other = sample(0, salt="ann"), sample(1, salt="bob")
    await put(store, mine, other)
    assert [await store.token_ids(one.key.id, "ann") for one in (mine, other)] == [mine.ids, None]
    assert [await store.find(one.key.id, "ann") is None for one in (mine, other)] == [False, True]
    assert [one.id for one in await store.page("", 9, "ann")] == [mine.key.id]
    assert await store.delete(other.key.id, "ann") is store.evict_nowait(other.key.id, "ann") is False
    assert store.contains(other.key)
    assert await store.delete(mine.key.id, "ann")


async def test_a_deleted_chunk_is_gone_for_good(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    assert [await store.delete(sample().key.id) for _ in range(2)] == [True, False]
    assert not store.contains(sample().key)
    await store.close()
    assert (await open_store(tmp_path)).stats().chunks == 0


async def test_a_deleted_chunk_can_be_stored_again(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    await store.delete(sample().key.id)
    assert await put(store, sample()) == [True]
    store.evict_nowait(sample().key.id)
    assert await read(store, sample()) == ("disk", sample().layers)


async def test_leases_outlive_a_delete(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store, one = await open_store(tmp_path), sample()
    await put(store, one)
    store.evict_nowait(one.key.id)
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    with lease:
        assert await store.delete(one.key.id)
        assert [bytes(await lease.layer(index)) for index in range(4)] == one.layers
    assert store.stats().host_bytes == 0


async def test_in_memory_a_delete_and_an_eviction_forget(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    await put(store, sample(0), sample(1))
    assert await store.delete(sample(0).key.id)
    assert store.evict_nowait(sample(1).key.id)
    assert store.stats().chunks == 0


async def test_the_budget_drops_the_least_recently_used(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path, budget=2 * sample().num_bytes)
    await put(store, *(sample(number) for number in range(3)))
    assert store.stats().host_bytes == 2 * sample().num_bytes
    assert [(await read(store, sample(number)) or ("miss",))[0] for number in (2, 1)] == ["host", "host"]
    assert await read(store, sample(0)) == ("disk", sample(0).layers)


async def test_a_chunk_above_the_budget_is_served_from_disk(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, budget=1)
    await put(store, sample())
    assert [await read(store, sample()) for _ in range(2)] == [("disk", sample().layers)] * 2
    assert store.stats().host_bytes == 0


async def test_in_memory_a_chunk_beside_leased_ones_must_fit(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None, budget=2 * sample().num_bytes)
    await put(store, sample(0), sample(1))
    leases = [await store.lease(sample(number).key, sample(number).ids) for number in range(2)]
    with pytest.raises(StoreWriteFailed, match="2560 of the budget of 2560 bytes are leased"):
        await put(store, sample(2))
    for lease in leases:
        assert lease is not None
        lease.release()
    assert await put(store, sample(2)) == [True]
    assert await read(store, sample(1)) == ("host", sample(1).layers)


async def test_a_budget_of_nothing_is_refused(shape: KVShape, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host_bytes_budget is 0"):
        await ChunkStore.open(tmp_path, shape, "model-a", 0)


async def test_a_second_store_on_the_folder_is_refused(open_store: OpenStore, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    with pytest.raises(StoreUnusable, match="in use by another process"):
        await open_store(tmp_path)
    await store.close()
    await open_store(tmp_path)


async def test_after_closing_everything_is_a_miss(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await put(store, sample())
    await store.close()
    await store.close()
    assert await store.lease(sample().key, sample().ids) is None
    assert not await store.delete(sample().key.id)
    with pytest.raises(StoreWriteFailed, match="closed"):
        await put(store, sample(1))


async def test_a_store_closes_at_the_end_of_its_block(shape: KVShape, tmp_path: Path) -> None:
    async with await ChunkStore.open(tmp_path, shape, "model-a", 1):
        pass
    async with await ChunkStore.open(tmp_path, shape, "model-a", 1):
        pass


@pytest.mark.uvloop
async def test_many_at_once_write_and_read_each_chunk_once(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store = await open_store(tmp_path, io)
    samples = [sample(number) for number in range(5)]
    created = await asyncio.gather(*(put(store, one) for one in samples * 4))
    assert sum(one for (one,) in created) == io.calls.count("write_file") == 5
    for one in samples:
        store.evict_nowait(one.key.id)
    io.calls.clear()
    found = await asyncio.gather(*(read(store, one) for one in samples * 4))
    assert [layers for _, layers in filter(None, found)] == [one.layers for one in samples] * 4
    assert (io.calls.count("read_heads"), io.calls.count("read_into")) == (5, 5)


def test_the_store_loads_without_torch() -> None:
    code = "import sys, kvblend.store.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
