from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.disk import DiskTier
from kvblend.store.errors import ChunkDamaged, StoreWriteFailed
from kvblend.store.files import AiofilesIO
from kvblend.store.index import IndexRow
from kvblend.store.keys import ChunkKey, pack_ids

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Flip, Make, OpenTier, Sample

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


async def write(tier: DiskTier, one: Sample) -> IndexRow:
    return await tier.write_ready(
        await tier.prepare(one.key, pack_ids(one.ids), [memoryview(layer) for layer in one.layers])
    )


async def read_all(tier: DiskTier, one: Sample) -> list[bytes]:
    header = await tier.read_header(one.key.digest)
    data = memoryview(bytearray(header.data_bytes))
    await tier.read_layers(header, data, 0, len(header.layers))
    return [bytes(data[span.offset : span.offset + span.length]) for span in header.layers]


def kvc_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "chunks").rglob("*") if path.is_file())


async def test_a_written_chunk_is_read_back(open_tier: OpenTier, sample: Make) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    assert await read_all(tier, sample()) == sample().layers


async def test_a_file_lies_under_its_id(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    tier, _ = await open_tier()
    row = await write(tier, sample())
    assert row == IndexRow(5, sample().path(tmp_path).stat().st_size)


async def test_file_and_folders_are_synced_in_order(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    tier, _ = await open_tier(io)
    io.calls.clear()
    await write(tier, sample())
    assert io.calls == ["make_folder", "sync_folder", "write_file", "rename", "sync_folder"]


@pytest.mark.parametrize("step", ["make_folder", "write_file", "rename", "sync_folder"])
@pytest.mark.parametrize("error", [NO_SPACE, BROKEN])
async def test_a_failed_write_leaves_nothing_behind(
    open_tier: OpenTier, sample: Make, io: FaultyIO, tmp_path: Path, step: str, error: OSError
) -> None:
    tier, _ = await open_tier(io)
    io.fail(step, error)
    with pytest.raises(StoreWriteFailed, match=f"{sample().key.id} could not be written .*{error.strerror}"):
        await write(tier, sample())
    assert kvc_files(tmp_path) == []


async def test_a_failed_sync_after_the_rename_leaves_nothing_behind(
    open_tier: OpenTier, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    tier, _ = await open_tier(io)
    await write(tier, sample())
    io.fail("sync_folder", BROKEN)
    with pytest.raises(StoreWriteFailed):
        await write(tier, sample())
    assert kvc_files(tmp_path) == []


async def test_a_write_that_lost_bytes_is_noticed_before_the_rename(
    open_tier: OpenTier, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    tier, _ = await open_tier(io)
    io.write_cut_bytes = 1
    with pytest.raises(StoreWriteFailed, match="bytes were written"):
        await write(tier, sample())
    assert kvc_files(tmp_path) == []


async def test_a_failed_write_spares_the_file_that_is_there(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    tier, _ = await open_tier(io)
    await write(tier, sample())
    io.fail("write_file", NO_SPACE)
    with pytest.raises(StoreWriteFailed):
        await write(tier, sample())
    assert await read_all(tier, sample()) == sample().layers


async def test_a_folder_that_vanished_is_made_again(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    sample().path(tmp_path).unlink()
    sample().path(tmp_path).parent.rmdir()
    with pytest.raises(StoreWriteFailed):
        await write(tier, sample())
    await write(tier, sample())
    assert await read_all(tier, sample()) == sample().layers


async def test_short_reads_are_continued(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    tier, _ = await open_tier(io)
    await write(tier, sample())
    io.read_bytes_max = 777
    assert await read_all(tier, sample()) == sample().layers


async def test_a_run_of_layers_is_one_operation(open_tier: OpenTier, sample: Make, io: FaultyIO) -> None:
    tier, _ = await open_tier(io)
    await write(tier, sample())
    io.calls.clear()
    await read_all(tier, sample())
    assert io.calls == ["read_heads", "read_into"]


async def test_a_flipped_bit_names_its_layer(
    open_tier: OpenTier, sample: Make, tmp_path: Path, flip_byte: Flip
) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    header = await tier.read_header(sample().key.digest)
    flip_byte(sample().path(tmp_path), header.data_start + header.layers[2].offset + 7)
    with pytest.raises(ChunkDamaged, match="checksum of layer 2"):
        await read_all(tier, sample())


async def test_every_flipped_payload_byte_is_noticed(
    open_tier: OpenTier, sample: Make, tmp_path: Path, flip_byte: Flip
) -> None:
    tier, _ = await open_tier()
    one = sample(tokens=1)
    await write(tier, one)
    header = await tier.read_header(one.key.digest)
    for span in header.layers:
        for at in range(span.offset, span.offset + span.length):
            flip_byte(one.path(tmp_path), header.data_start + at)
            with pytest.raises(ChunkDamaged):
                await read_all(tier, one)
            flip_byte(one.path(tmp_path), header.data_start + at)
    assert await read_all(tier, one) == one.layers


async def test_a_file_cut_while_it_is_read_is_damaged(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    header = await tier.read_header(sample().key.digest)
    with sample().path(tmp_path).open("r+b") as file:
        file.truncate(header.data_start + 100)
    with pytest.raises(ChunkDamaged, match=f"the file ends at byte {header.data_start + 100}"):
        await tier.read_layers(header, memoryview(bytearray(header.data_bytes)), 0, 4)


async def test_a_damaged_file_is_set_aside(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    await tier.set_aside(sample().key.digest)
    await tier.set_aside(sample().key.digest)
    assert kvc_files(tmp_path) == []
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [f"{sample().key.id}.kvc"]


async def test_a_damaged_file_that_cannot_be_moved_is_removed(
    open_tier: OpenTier, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    tier, _ = await open_tier(io)
    await write(tier, sample())
    io.fail("rename", NO_SPACE)
    await tier.set_aside(sample().key.digest)
    assert kvc_files(tmp_path) == []


async def test_hostile_key_texts_stay_inside_the_root(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    tier, _ = await open_tier()
    key = ChunkKey.of("../../x", "a/../\0..", (), (1,))
    assert tier.path_of(key.digest) == tmp_path / "chunks" / key.id[:2] / f"{key.id}.kvc"


async def test_a_copy_is_writable(open_tier: OpenTier) -> None:
    tier, _ = await open_tier(AiofilesIO())
    copy = await tier.copy(memoryview(b"abc"))
    assert bytes(copy) == b"abc"
    assert not copy.readonly
