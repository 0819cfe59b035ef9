"""A store on a disk that fails, lies, stalls or loses bits: misses and warnings, never a wrong byte."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.errors import ChunkDamaged, StoreWriteFailed
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Flip, Make, OpenStore, Sample

BROKEN = OSError(errno.EIO, "Input/output error")
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


async def cold(open_store: OpenStore, root: Path, one: Sample, io: FaultyIO | None = None) -> ChunkStore:
    """A store in which the sample lies on disk only."""
    store = await open_store(root, io)
    await store.put(one.key, one.ids, one.layers)
    store.evict_nowait(one.key.id)
    return store


async def leased(store: ChunkStore, one: Sample) -> ChunkLease:
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    return lease


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_flipped_bit_is_a_miss_with_one_warning(
    open_store: OpenStore, sample: Make, tmp_path: Path, flip_byte: Flip, caplog: pytest.LogCaptureFixture
) -> None:
    store, one = await cold(open_store, tmp_path, sample()), sample()
    flip_byte(one.path(tmp_path), 4096 + 4096 + 5)
    first, second = await leased(store, one), await leased(store, one)
    for lease in (first, second):
        with lease, pytest.raises(ChunkDamaged, match="layer 1"):
            await lease.layer(1)
    assert not store.contains(one.key)
    assert await store.lease(one.key, one.ids) is None
    assert len(warnings_of(caplog)) == 1
    assert store.stats().damaged == 1


async def test_a_damaged_file_is_moved_aside(
    open_store: OpenStore, sample: Make, tmp_path: Path, flip_byte: Flip
) -> None:
    store, one = await cold(open_store, tmp_path, sample()), sample()
    flip_byte(one.path(tmp_path), 4096)
    with await leased(store, one) as lease, pytest.raises(ChunkDamaged):
        await lease.layer(0)
    await store.close()
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [one.path(tmp_path).name]
    assert not one.path(tmp_path).exists()


async def test_layers_read_before_the_damage_stay_usable(
    open_store: OpenStore, sample: Make, tmp_path: Path, flip_byte: Flip
) -> None:
    store, one = await cold(open_store, tmp_path, sample()), sample()
    with await leased(store, one) as lease:
        await lease.layer(0)
        flip_byte(one.path(tmp_path), 4096 + 4096)
        with pytest.raises(ChunkDamaged):
            await lease.prefetch(range(4))
        assert bytes(await lease.layer(0)) == one.layers[0]


async def test_a_damaged_chunk_can_be_stored_again(
    open_store: OpenStore, sample: Make, tmp_path: Path, flip_byte: Flip
) -> None:
    store, one = await cold(open_store, tmp_path, sample()), sample()
    flip_byte(one.path(tmp_path), 4096)
    with await leased(store, one) as lease, pytest.raises(ChunkDamaged):
        await lease.layer(0)
    assert await store.put(one.key, one.ids, one.layers)
    await store.close()
    store = await open_store(tmp_path)
    with await leased(store, one) as lease:
        assert bytes(await lease.layer(0)) == one.layers[0]


async def test_a_put_waits_until_the_damaged_file_is_out_of_its_way(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, flip_byte: Flip
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    flip_byte(one.path(tmp_path), 4096)
    io.arrived.clear()
    io.gate("rename")
    with await leased(store, one) as lease, pytest.raises(ChunkDamaged):
        await lease.layer(0)
    await io.arrived["rename"].acquire()
    writing = asyncio.create_task(store.put(one.key, one.ids, one.layers))
    await asyncio.sleep(0)
    io.open_gate("rename")
    assert await writing
    store.evict_nowait(one.key.id)
    with await leased(store, one) as lease:
        assert bytes(await lease.layer(0)) == one.layers[0]


@pytest.mark.parametrize("at", [0, 8, 20, 60, 4095])
async def test_a_header_damaged_while_open_is_a_miss(
    open_store: OpenStore, sample: Make, tmp_path: Path, flip_byte: Flip, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    store, one = await cold(open_store, tmp_path, sample()), sample()
    flip_byte(one.path(tmp_path), at)
    assert await store.lease(one.key, one.ids) is None
    assert not store.contains(one.key)
    assert len(warnings_of(caplog)) == 1


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(6000)


@pytest.mark.parametrize("harm", [cut, Path.unlink, lambda path: path.write_bytes(b"PK\x03\x04")])
async def test_a_truncated_missing_or_foreign_file_is_a_miss(
    open_store: OpenStore, sample: Make, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    store, one = await cold(open_store, tmp_path, sample()), sample()
    harm(one.path(tmp_path))
    assert await store.lease(one.key, one.ids) is None
    assert await store.put(one.key, one.ids, one.layers)


async def test_token_ids_of_an_unreadable_chunk_are_none(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.fail("read_heads", BROKEN)
    assert await store.token_ids(one.key.id) is None


async def test_an_unreadable_header_is_a_miss_and_the_file_stays(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.fail("read_heads", BROKEN)
    assert await store.lease(one.key, one.ids) is None
    assert len(warnings_of(caplog)) == 1
    await store.close()
    assert one.path(tmp_path).exists()


async def test_an_unreadable_layer_is_a_miss_until_it_is_stored_again(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.fail("read_into", BROKEN)
    with await leased(store, one) as lease, pytest.raises(ChunkDamaged, match="Input/output error"):
        await lease.layer(0)
    assert not store.contains(one.key)
    assert await store.put(one.key, one.ids, one.layers)


async def test_bits_flipped_on_the_way_are_noticed(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await cold(open_store, tmp_path, sample(), io), sample()
    io.flip_reads = True
    with await leased(store, one) as lease, pytest.raises(ChunkDamaged):
        await lease.prefetch(range(4))


@pytest.mark.parametrize("error", [NO_SPACE, BROKEN, PermissionError(errno.EACCES, "Permission denied")])
async def test_a_failed_write_is_an_error_and_a_later_one_succeeds(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path, error: OSError
) -> None:
    store, one = await open_store(tmp_path, io), sample()
    io.fail("write_file", error)
    with pytest.raises(StoreWriteFailed, match=str(error.strerror)):
        await store.put(one.key, one.ids, one.layers)
    assert not store.contains(one.key)
    assert store.stats().writes_failed == 1
    assert await store.put(one.key, one.ids, one.layers)


async def test_who_waited_for_a_failed_write_writes_itself(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await open_store(tmp_path, io), sample()
    io.gate("write_file")
    io.fail("write_file", NO_SPACE)
    both = [asyncio.create_task(store.put(one.key, one.ids, one.layers)) for _ in range(2)]
    await io.arrived["write_file"].acquire()
    io.open_gate("write_file")
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, StoreWriteFailed)
    assert second is True


async def test_a_cancelled_put_is_finished_all_the_same(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    store, one = await open_store(tmp_path, io), sample()
    io.gate("rename")
    writing = asyncio.create_task(store.put(one.key, one.ids, one.layers))
    await io.arrived["rename"].acquire()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert not store.contains(one.key)
    io.open_gate("rename")
    assert await store.put(one.key, one.ids, one.layers) is False
    assert store.contains(one.key)
