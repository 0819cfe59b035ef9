from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.disk import DiskTier
from kvblend.store.errors import ChunkDamaged
from kvblend.store.keys import pack_ids
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.reads import LayerReader
from kvblend.store.tasks import TaskSet

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Flip, Make, OpenTier, Sample


class Desk:
    """A reader over one stored chunk, with what it reported."""

    def __init__(self, reader: LayerReader, entry: PoolEntry, pool: HostPool, tasks: TaskSet) -> None:
        self.reader, self.entry, self.pool, self.tasks = reader, entry, pool, tasks
        self.failures: list[str] = []


async def set_up(open_tier: OpenTier, one: Sample, io: FaultyIO | None = None) -> Desk:
    tier, _ = await open_tier(io)
    await tier.write_ready(await tier.prepare(one.key, pack_ids(one.ids), [memoryview(layer) for layer in one.layers]))
    header = await tier.read_header(one.key.digest)
    pool, tasks = HostPool(1 << 20), TaskSet()
    failures: list[str] = []
    entry = PoolEntry.empty(header, memoryview(bytearray(header.data_bytes)), tier, "disk")
    pool.add(entry)
    reader = LayerReader(pool, tasks, lambda _, error: failures.append(str(error)))
    desk = Desk(reader, entry, pool, tasks)
    desk.failures = failures
    if io is not None:
        io.calls.clear()
    return desk


async def test_all_layers_come_in_one_operation(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    await desk.reader.ensure(desk.entry, range(4))
    assert [bytes(layer or b"") for layer in desk.entry.layers] == sample().layers
    assert io.calls == ["read_into"]
    assert (desk.reader.layers_read, desk.reader.bytes_read) == (4, sample().num_bytes)


async def test_layers_that_are_not_neighbours_come_in_one_operation_too(
    open_tier: OpenTier, sample: Make, io: FaultyIO
) -> None:
    desk = await set_up(open_tier, sample(), io)
    await desk.reader.ensure(desk.entry, [0, 2, 3])
    assert io.calls == ["read_into"]
    assert [layer is None for layer in desk.entry.layers] == [False, True, False, False]


async def test_what_is_there_is_not_read_again(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    await desk.reader.ensure(desk.entry, [1])
    await desk.reader.ensure(desk.entry, [1])
    assert io.calls == ["read_into"]


async def second(desk: Desk, open_tier: OpenTier, one: Sample, io: FaultyIO) -> PoolEntry:
    """An entry of another chunk in the same tier."""
    tier = desk.entry.source
    assert isinstance(tier, DiskTier)
    await tier.write_ready(await tier.prepare(one.key, pack_ids(one.ids), [memoryview(layer) for layer in one.layers]))
    header = await tier.read_header(one.key.digest)
    entry = PoolEntry.empty(header, memoryview(bytearray(header.data_bytes)), tier, "disk")
    desk.pool.add(entry)
    io.calls.clear()
    return entry


async def test_layers_of_several_chunks_come_in_one_operation(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    other = await second(desk, open_tier, sample(9), io)
    assert await desk.reader.ensure_all([desk.entry, other, desk.entry], [1, 2]) == [None, None, None]
    assert io.calls == ["read_into"]
    for entry, one in ((desk.entry, sample()), (other, sample(9))):
        assert [bytes(layer) for layer in entry.layers[1:3] if layer is not None] == one.layers[1:3]
    assert (desk.entry.pins, other.pins) == (0, 0)


async def test_a_damaged_chunk_takes_no_other_one_with_it(
    open_tier: OpenTier, sample: Make, io: FaultyIO, tmp_path: Path, flip_byte: Flip
) -> None:
    desk = await set_up(open_tier, sample(), io)
    other = await second(desk, open_tier, sample(9), io)
    flip_byte(sample().path(tmp_path), 4096 + 2 * 4096)
    first, fine = await desk.reader.ensure_all([desk.entry, other], [2])
    assert isinstance(first, ChunkDamaged)
    assert fine is None
    assert desk.failures == ["the checksum of layer 2 does not match"]
    assert (desk.entry.reads, other.reads, desk.entry.pins, other.pins) == ({}, {}, 0, 0)
    again = await desk.reader.ensure_all([desk.entry, other], [1])
    assert [error is None for error in again] == [False, True]


async def test_short_reads_of_several_chunks_are_gone_on_with(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    other = await second(desk, open_tier, sample(9), io)
    io.read_bytes_max = 100
    assert await desk.reader.ensure_all([desk.entry, other], range(4)) == [None, None]
    assert [bytes(layer or b"") for layer in other.layers] == sample(9).layers


async def test_one_read_serves_all_who_wait(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    io.gate("read_into")
    waiters = [asyncio.create_task(desk.reader.ensure(desk.entry, [2])) for _ in range(5)]
    await io.arrived["read_into"].acquire()
    io.open_gate("read_into")
    await asyncio.gather(*waiters)
    assert io.calls == ["read_into"]


async def test_a_cancelled_waiter_does_not_stop_the_read(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    io.gate("read_into")
    first, second = (asyncio.create_task(desk.reader.ensure(desk.entry, [2])) for _ in range(2))
    await io.arrived["read_into"].acquire()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    io.open_gate("read_into")
    await second
    assert bytes(desk.entry.layers[2] or b"") == sample().layers[2]


async def test_a_read_keeps_its_entry_in_the_pool(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    io.gate("read_into")
    waiter = asyncio.create_task(desk.reader.ensure(desk.entry, [2]))
    await io.arrived["read_into"].acquire()
    assert not desk.pool.evict(desk.entry.key.digest)
    io.open_gate("read_into")
    await waiter
    assert desk.pool.evict(desk.entry.key.digest)


async def test_damage_is_reported_once_and_stays(
    open_tier: OpenTier, sample: Make, tmp_path: Path, flip_byte: Flip
) -> None:
    desk = await set_up(open_tier, sample())
    await desk.reader.ensure(desk.entry, [0])
    flip_byte(sample().path(tmp_path), 4096 + 2 * 4096)
    for _ in range(2):
        with pytest.raises(ChunkDamaged, match="layer 2"):
            await desk.reader.ensure(desk.entry, [1, 2])
    assert desk.failures == ["the checksum of layer 2 does not match"]
    await desk.reader.ensure(desk.entry, [0])


async def test_an_error_of_the_disk_is_a_damaged_chunk(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    io.fail("read_into", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(ChunkDamaged, match="Input/output error"):
        await desk.reader.ensure(desk.entry, [0])
    assert len(desk.failures) == 1


async def test_a_failed_read_gives_its_pin_back(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    io.fail("read_into", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(ChunkDamaged):
        await desk.reader.ensure(desk.entry, [0])
    assert (desk.entry.pins, desk.entry.reads, len(desk.tasks)) == (0, {}, 0)


async def test_a_closed_reader_starts_nothing(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    desk = await set_up(open_tier, sample(), io)
    await desk.reader.ensure(desk.entry, [0])
    desk.reader.closed = True
    await desk.reader.ensure(desk.entry, [0])
    with pytest.raises(ChunkDamaged, match="closed"):
        await desk.reader.ensure(desk.entry, [0, 1])
    assert io.calls == ["read_into"]
    assert desk.failures == []
