from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample


async def leased(store: ChunkStore, one: Sample) -> ChunkLease:
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    return lease


async def cold(open_store: OpenStore, root: Path, one: Sample, io: FaultyIO | None = None) -> ChunkStore:
    """A store in which the sample lies on disk only."""
    store = await open_store(root, io)
    await store.put(one.key, one.ids, one.layers)
    store.evict_nowait(one.key.id)
    return store


async def test_a_lease_names_its_chunk(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    await store.put(sample().key, sample().ids, sample().layers)
    with await leased(store, sample()) as lease:
        assert (lease.key, lease.num_tokens, lease.tier) == (sample().key, 5, "host")


async def test_a_layer_is_none_until_it_is_read(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await cold(open_store, tmp_path, sample())
    with await leased(store, sample()) as lease:
        assert lease.tier == "disk"
        assert lease.layer_nowait(1) is None
        assert bytes(await lease.layer(1)) == sample().layers[1]
        ready = lease.layer_nowait(1)
        assert ready is not None
        assert bytes(ready) == sample().layers[1]


async def test_layers_are_writable_buffers(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await cold(open_store, tmp_path, sample())
    with await leased(store, sample()) as lease:
        layer = await lease.layer(0)
        assert (layer.readonly, layer.format, layer.contiguous) == (False, "B", True)


async def test_prefetched_layers_are_there(open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path) -> None:
    store = await cold(open_store, tmp_path, sample(), io)
    with await leased(store, sample()) as lease:
        io.calls.clear()
        await lease.prefetch(range(1, 4))
        assert io.calls == ["read_into"]
        assert [lease.layer_nowait(index) is None for index in range(4)] == [True, False, False, False]


async def test_an_empty_prefetch_does_nothing(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await cold(open_store, tmp_path, sample())
    with await leased(store, sample()) as lease:
        await lease.prefetch(range(0))
        assert lease.layer_nowait(0) is None


@pytest.mark.parametrize("index", [-1, 4])
async def test_a_layer_outside_the_model_is_refused(open_store: OpenStore, sample: Make, index: int) -> None:
    store = await open_store(None)
    await store.put(sample().key, sample().ids, sample().layers)
    with await leased(store, sample()) as lease, pytest.raises(ValueError, match=r"layers 0\.\.3"):
        await lease.layer(index)


async def test_a_prefetch_outside_the_model_is_refused(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    await store.put(sample().key, sample().ids, sample().layers)
    with await leased(store, sample()) as lease, pytest.raises(ValueError, match=r"layers 2\.\.4 asked for"):
        await lease.prefetch(range(2, 5))


async def test_release_counts_once(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    await store.put(sample().key, sample().ids, sample().layers)
    first, second = await leased(store, sample()), await leased(store, sample())
    first.release()
    first.release()
    assert (store.stats().leases, store.evict_nowait(sample().key.id)) == (1, False)
    second.release()
    assert (store.stats().leases, store.evict_nowait(sample().key.id)) == (0, True)


async def test_a_released_lease_gives_nothing(open_store: OpenStore, sample: Make) -> None:
    store = await open_store(None)
    await store.put(sample().key, sample().ids, sample().layers)
    lease = await leased(store, sample())
    lease.release()
    with pytest.raises(ValueError, match="was released"):
        await lease.layer(0)
