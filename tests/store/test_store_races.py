"""Two things at once on one chunk: cancelling, deleting, storing and closing while others wait."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.errors import ChunkDamaged
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Make, OpenStore, Sample


async def cold(open_store: OpenStore, root: Path, one: Sample, io: FaultyIO) -> ChunkStore:
    """A store in which the sample lies on disk only."""
    store = await open_store(root, io)
    await store.put(one.key, one.ids, one.layers)
    store.evict_nowait(one.key.id)
    return store


async def leased(store: ChunkStore, one: Sample) -> ChunkLease:
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    return lease


async def test_a_cancelled_lease_pins_nothing_and_spares_the_others(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.gate("read_heads")
    first, second = (asyncio.create_task(store.lease(one.key, one.ids)) for _ in range(2))
    await io.arrived["read_heads"].acquire()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    io.open_gate("read_heads")
    lease = await second
    assert lease is not None
    assert store.stats().leases == 1
    lease.release()
    assert store.stats().pinned_bytes == 0


async def test_a_chunk_deleted_while_its_header_is_read_is_a_miss(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.gate("read_heads")
    leasing = asyncio.create_task(store.lease(one.key, one.ids))
    await io.arrived["read_heads"].acquire()
    assert await store.delete(one.key.id)
    io.open_gate("read_heads")
    assert await leasing is None
    assert store.stats().damaged == 0


async def test_a_failing_header_read_spares_a_chunk_stored_anew_meanwhile(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.gate("read_heads")
    io.fail("read_heads", OSError(errno.EIO, "Input/output error"))
    leasing = asyncio.create_task(store.lease(one.key, one.ids))
    await io.arrived["read_heads"].acquire()
    await store.delete(one.key.id)
    await store.put(one.key, one.ids, one.layers)
    io.open_gate("read_heads")
    assert await leasing is None
    assert store.contains(one.key)


async def test_a_header_read_before_the_chunk_was_stored_anew_is_not_used(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.gate("heads_read")
    leasing = asyncio.create_task(store.lease(one.key, one.ids))
    await io.arrived["heads_read"].acquire()
    await store.delete(one.key.id)
    await store.put(one.key, one.ids, sample(1).layers)
    store.evict_nowait(one.key.id)
    leasing_anew = asyncio.create_task(store.lease(one.key, one.ids))
    await io.arrived["heads_read"].acquire()
    io.open_gate("heads_read")
    assert await leasing is None
    lease = await leasing_anew
    assert lease is not None
    with lease:
        assert bytes(await lease.layer(0)) == sample(1).layers[0]


async def test_a_chunk_can_be_put_while_it_is_read(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.gate("read_into")
    with await leased(store, one) as lease:
        reading = asyncio.create_task(lease.layer(0))
        await io.arrived["read_into"].acquire()
        assert await store.put(one.key, one.ids, one.layers) is False
        io.open_gate("read_into")
        assert bytes(await reading) == one.layers[0]


async def test_a_delete_waits_for_the_layers_of_lessees(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.gate("read_into")
    with await leased(store, one) as lease:
        deleting = asyncio.create_task(store.delete(one.key.id))
        await io.arrived["read_into"].acquire()
        assert one.path(tmp_path).exists()
        io.open_gate("read_into")
        assert await deleting
        assert not one.path(tmp_path).exists()
        assert [lease.layer_nowait(index) is None for index in range(4)] == [False] * 4


async def test_a_put_waits_for_a_delete_under_way(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.gate("remove")
    deleting = asyncio.create_task(store.delete(one.key.id))
    await io.arrived["remove"].acquire()
    putting = asyncio.create_task(store.put(one.key, one.ids, one.layers))
    await asyncio.sleep(0)
    io.open_gate("remove")
    assert [await deleting, await putting] == [True, True]
    assert one.path(tmp_path).exists()


async def test_a_chunk_damaged_while_it_is_deleted_is_gone(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.flip_reads = True
    with await leased(store, one) as lease:
        assert await store.delete(one.key.id)
        with pytest.raises(ChunkDamaged):
            await lease.layer(0)
    assert not store.contains(one.key)


async def test_a_file_that_cannot_be_removed_is_forgotten_and_said(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.fail("remove", OSError(errno.EIO, "Input/output error"))
    assert not await store.delete(one.key.id)
    assert "could not be removed" in caplog.text
    assert not store.contains(one.key)


async def test_closing_waits_for_reads_and_writes(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one, other = await cold(open_store, tmp_path, sample(), io), sample(), sample(1)
    io.gate("read_into")
    io.gate("write_file")
    with await leased(store, one) as lease:
        reading = asyncio.create_task(lease.layer(0))
        writing = asyncio.create_task(store.put(other.key, other.ids, other.layers))
        for name in ("read_into", "write_file"):
            await io.arrived[name].acquire()
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        assert not closing.done()
        io.open_gate("read_into")
        io.open_gate("write_file")
        await closing
        assert bytes(await reading) == one.layers[0]
        assert await writing
        assert bytes(await lease.layer(0)) == one.layers[0]
        with pytest.raises(ChunkDamaged, match="closed"):
            await lease.layer(1)
    assert other.path(tmp_path).exists()


async def test_a_cancelled_close_goes_on(open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path) -> None:
    store, one = await open_store(tmp_path, io), sample()
    io.gate("write_file")
    writing = asyncio.create_task(store.put(one.key, one.ids, one.layers))
    await io.arrived["write_file"].acquire()
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    io.open_gate("write_file")
    assert await writing
    await store.close()
    await open_store(tmp_path)
