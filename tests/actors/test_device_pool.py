"""The device pool on a pretended device: one right copy, within the budget, of what the store has."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_driver import key_of
from device_pool_rig import CHUNKS, ONE, WANTED, A, B, C, lease, pool_of, read, take, use
from shell_rig import SHAPE, payloads

from kvblend.actors import device_pool as module
from kvblend.actors.device_pool import make_device_pool
from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.store.keys import ChunkKey
from kvblend.store.lease import ChunkLease


async def test_a_chunk_that_was_loaded_once_is_served_without_the_store() -> None:
    async with pool_of(2) as (pool, store):
        assert await use(pool, store, A) == ["host"]
        leases = store.stats().hits_host
        assert await use(pool, store, A, A) == ["device_pool", "device_pool"]
        assert (store.stats().hits_host, store.stats().leases) == (leases, 0)
        found = pool.stats()
        assert (found.hits, found.fills, found.evictions, found.chunks, found.num_bytes) == (2, 1, 0, 1, ONE)


async def test_the_least_recently_used_goes_when_room_is_needed() -> None:
    async with pool_of(2) as (pool, store):
        await use(pool, store, A, B, A, C)
        assert pool.stats().evictions == 1
        assert await use(pool, store, A, C, B) == ["device_pool", "device_pool", "host"]


async def test_by_cost_the_one_that_is_used_more_stays() -> None:
    async with pool_of(2, "cost") as (pool, store):
        await use(pool, store, A, A, A, B, C)
        assert await use(pool, store, A) == ["device_pool"]


async def test_what_is_leased_stays_and_who_finds_no_room_is_served_from_host_memory() -> None:
    async with pool_of(2) as (pool, store):
        await use(pool, store, A, B)
        held = [await lease(pool, store, ids) for ids in (A, B)]
        other = await lease(pool, store, C)
        assert isinstance(other, ChunkLease)
        found = pool.stats()
        assert (found.skipped, found.evictions, found.pinned_bytes, found.num_bytes) == (1, 0, 2 * ONE, 2 * ONE)
        assert [read(one) for one in held] == [WANTED, WANTED]
        for one in (*held, other):
            one.release()
        assert await use(pool, store, C) == ["host"]
        assert await use(pool, store, C) == ["device_pool"]


async def test_nobody_goes_for_a_chunk_that_is_larger_than_the_budget() -> None:
    long = tuple(range(100))
    async with pool_of(2) as (pool, store):
        await store.put(key_of(long), long, payloads(100))
        await use(pool, store, A, B)
        (await lease(pool, store, long)).release()
        assert (pool.stats().skipped, pool.stats().evictions) == (1, 0)


async def test_a_chunk_that_did_not_get_there_whole_leaves_with_its_last_lease() -> None:
    async with pool_of(2) as (pool, store):
        held = await lease(pool, store, A)
        take(held, 0)
        assert pool.stats().num_bytes == ONE
        held.release()
        pool.validate()
        assert (pool.stats().num_bytes, pool.lease(key_of(A))) == (0, None)


async def test_a_layer_that_is_taken_after_its_lease_takes_no_device_memory() -> None:
    async with pool_of(2) as (pool, store):
        held = await lease(pool, store, A)
        late = held.layer_nowait(0)
        held.release()
        assert callable(late)
        assert isinstance(late(), memoryview)


async def test_requests_that_load_a_chunk_at_the_same_time_share_one_copy() -> None:
    async with pool_of(2) as (pool, store):
        first, second = await lease(pool, store, A), await lease(pool, store, A)
        assert pool.lease(key_of(A)) is None
        assert take(second, 0).data_ptr() == take(first, 0).data_ptr()
        first.release()
        assert read(second) == WANTED
        assert (pool.stats().fills, pool.stats().num_bytes) == (1, ONE)
        second.release()
        assert await use(pool, store, A) == ["device_pool"]


async def test_a_layer_that_is_on_the_device_is_not_read_for_whoever_asked_the_store(tmp_path: Path) -> None:
    async with pool_of(2, folder=tmp_path) as (pool, store):
        await use(pool, store, A)
        store.evict_nowait(key_of(A).id)
        before = store.stats().layers_read
        cold = await store.lease(key_of(A), A)
        assert cold is not None
        held = pool.admit(cold)
        assert read(held) == WANTED
        assert store.stats().layers_read == before
        held.release()


async def test_a_deleted_chunk_is_found_by_nobody_and_kept_for_who_holds_it() -> None:
    async with pool_of(2) as (pool, store):
        await use(pool, store, A, B)
        held = await lease(pool, store, A)
        await store.delete(key_of(A).id)
        await store.delete(key_of(B).id)
        assert (pool.lease(key_of(A)), pool.lease(key_of(B))) == (None, None)
        pool.validate()
        assert (read(held), pool.stats().num_bytes) == (WANTED, ONE)
        held.release()
        pool.validate()
        assert pool.stats().num_bytes == 0


async def test_a_chunk_that_is_deleted_while_it_comes_in_is_found_by_nobody() -> None:
    async with pool_of(2) as (pool, store):
        held = await lease(pool, store, A)
        await store.delete(key_of(A).id)
        assert read(held) == WANTED
        assert pool.lease(key_of(A)) is None
        held.release()
        pool.validate()
        assert pool.stats().num_bytes == 0


async def test_a_chunk_that_is_stored_anew_is_served_as_it_is_now() -> None:
    async with pool_of(2) as (pool, store):
        await use(pool, store, A)
        old = await store.lease(key_of(A), A)
        assert old is not None
        await store.put(key_of(A), A, payloads(4, 50), replace=True)
        # a lease of what was there before brings nothing in
        assert pool.admit(old) is old
        old.release()
        for tier in ("host", "device_pool"):
            held = await lease(pool, store, A)
            assert (held.tier, read(held)) == (tier, [bytes(layer) for layer in payloads(4, 50)])
            held.release()


async def test_without_a_folder_a_chunk_that_leaves_host_memory_leaves_the_device() -> None:
    async with pool_of(2) as (pool, store):
        await use(pool, store, A)
        assert store.evict_nowait(key_of(A).id)
        assert pool.lease(key_of(A)) is None


async def test_a_chunk_that_only_left_host_memory_is_served_without_a_read(tmp_path: Path) -> None:
    async with pool_of(2, folder=tmp_path) as (pool, store):
        await use(pool, store, A)
        assert store.evict_nowait(key_of(A).id)
        before = store.stats().layers_read
        assert await use(pool, store, A) == ["device_pool"]
        assert store.stats().layers_read == before


async def test_a_hit_keeps_the_stored_chunk_from_looking_idle() -> None:
    async with pool_of(1, host_bytes=len(CHUNKS) * sum(map(len, WANTED))) as (pool, store):
        await use(pool, store, A)
        for ids in CHUNKS[1:]:
            other = await store.lease(key_of(ids), ids)
            assert other is not None
            other.release()
        assert await use(pool, store, A) == ["device_pool"]
        new = (90, 91, 92, 93)
        await store.put(key_of(new), new, payloads(4))
        assert [store.contains(key_of(ids)) for ids in (A, B)] == [True, False]


async def test_tenants_have_copies_of_their_own() -> None:
    async with pool_of(2) as (pool, store):
        await use(pool, store, A)
        assert pool.lease(ChunkKey.of("m", "another", (1,), A)) is None
        assert pool.lease(key_of(A, ())) is None


async def test_a_lease_is_given_back_once() -> None:
    async with pool_of(2) as (pool, store):
        first, second = await lease(pool, store, A), await lease(pool, store, A)
        first.release()
        first.release()
        assert pool.stats().pinned_bytes == ONE
        assert read(second) == WANTED
        second.release()
        pool.validate()


async def test_a_device_that_is_full_is_served_from_host_memory_and_the_budget_is_lowered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool_of(3) as (pool, store):
        await use(pool, store, A)

        def refuse(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        held = await lease(pool, store, B)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(torch, "empty", refuse)
            assert [bytes(take(held, layer)) for layer in range(SHAPE.num_layers)] == WANTED
            held.release()
        assert f"device_pool_bytes is now {2 * ONE}" in caplog.text
        assert pool.stats().bytes_budget == 2 * ONE
        pool.validate()
        assert await use(pool, store, A) == ["device_pool"]


async def test_a_device_that_is_full_for_a_moment_leaves_the_pool_half_of_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pool_of(4) as (pool, store):

        def refuse(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            for _ in range(5):
                await use(pool, store, A)
        assert pool.stats().bytes_budget == 2 * ONE
        await use(pool, store, A)
        assert await use(pool, store, A) == ["device_pool"]


SLOTS_BYTES = 2 * 4 * 256


def asked(free: int | None, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Any, Any]:
    """Settings and an engine on a device with so much memory free; a token's KV takes 8 bytes."""
    monkeypatch.setattr(module, "free_memory_bytes", lambda _: free)
    config = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1)
    model = SimpleNamespace(device=torch.device("cpu"), config=config, dtype=torch.float32)
    return Settings(device="cuda", kv_tokens_max=256, **more), SimpleNamespace(runner=SimpleNamespace(model=model))


async def test_there_is_a_pool_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of(1) as (_, store):
        assert make_device_pool(*asked(1 << 20, monkeypatch), store) is None
        pool = make_device_pool(*asked(4096 + SLOTS_BYTES, monkeypatch, device_pool_bytes=4096), store)
        assert pool is not None
        assert pool.stats().bytes_budget == 4096


@pytest.mark.parametrize(
    ("free", "said"),
    [(None, "has no memory of its own"), (4095 + SLOTS_BYTES, "is 4096; .* 6143 bytes free, of which 2048 are for kv")],
)
async def test_a_device_that_cannot_have_it_beside_the_kv_slots_is_an_error(
    free: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(1) as (_, store):
        with pytest.raises(RequestError, match=said) as caught:
            make_device_pool(*asked(free, monkeypatch, device_pool_bytes=4096), store)
        assert caught.value.param == "device_pool_bytes"
