from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store.disk import DiskTier, ScanReport
from kvblend.store.errors import ForeignFile, StoreUnusable
from kvblend.store.format import KVShape, build_header, checksum
from kvblend.store.index import IndexRow
from kvblend.store.keys import pack_ids

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Flip, Make, OpenTier, Sample

BROKEN = OSError(errno.EIO, "Input/output error")


async def write(tier: DiskTier, one: Sample) -> IndexRow:
    return await tier.write_ready(
        await tier.prepare(one.key, pack_ids(one.ids), [memoryview(layer) for layer in one.layers])
    )


def kvc_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "chunks").rglob("*") if path.is_file())


async def test_a_scan_finds_what_was_written(open_tier: OpenTier, sample: Make) -> None:
    tier, _ = await open_tier()
    samples = [sample(tokens=tokens) for tokens in (1, 20, 2000)]
    rows = {one.key.digest: await write(tier, one) for one in samples}
    _, found = await open_tier()
    assert found == ScanReport(rows, 0, 0)


async def test_opening_sweeps_stale_temporary_files_only(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    folder = sample().path(tmp_path).parent
    (folder / f"{'a' * 64}.tmp").write_bytes(b"half")
    (folder / "notes.tmp").write_bytes(b"not ours")
    (tmp_path / "chunks" / "readme").mkdir()
    await open_tier()
    assert kvc_files(tmp_path) == sorted([sample().path(tmp_path).name, "notes.tmp"])
    assert (tmp_path / "chunks" / "readme").is_dir()


async def test_another_models_files_are_counted_and_left_alone(
    open_tier: OpenTier, sample: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    before = sample().path(tmp_path).read_bytes()
    other, found = await open_tier(fingerprint="model-b")
    assert found == ScanReport({}, 0, 1)
    assert "1 files of another model" in caplog.text
    assert sample().path(tmp_path).read_bytes() == before
    with pytest.raises(ForeignFile, match="another model"):
        await other.read_header(sample().key.digest)


async def test_another_shapes_files_are_foreign(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    one = sample()
    shape = KVShape(4, 2, 4, "bfloat16")
    header, region = build_header(one.key, pack_ids(one.ids), shape, [checksum(b"")] * 4)
    await open_tier()
    one.path(tmp_path).parent.mkdir()
    one.path(tmp_path).write_bytes(region + bytes(header.data_bytes))
    _, found = await open_tier()
    assert (found.rows, found.foreign) == ({}, 1)


async def test_damaged_files_are_warned_of_and_left_alone(
    open_tier: OpenTier,
    sample: Make,
    tmp_path: Path,
    flip_byte: Flip,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier, _ = await open_tier()
    for number in range(3):
        await write(tier, sample(number))
    flip_byte(sample(0).path(tmp_path), 100)
    sample(1).path(tmp_path).write_bytes(b"")
    before = kvc_files(tmp_path)
    _, found = await open_tier()
    assert (list(found.rows), found.damaged) == ([sample(2).key.digest], 2)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2
    assert kvc_files(tmp_path) == before


async def test_a_renamed_file_is_damaged(open_tier: OpenTier, sample: Make, tmp_path: Path) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    path = sample().path(tmp_path)
    path.rename(path.with_name(f"{'b' * 64}.kvc"))
    _, found = await open_tier()
    assert (found.rows, found.damaged) == ({}, 1)


async def test_a_scan_goes_on_past_unreadable_folders_and_files(
    open_tier: OpenTier, sample: Make, tmp_path: Path
) -> None:
    tier, _ = await open_tier()
    await write(tier, sample())
    taken = sample().path(tmp_path).parent.name
    (tmp_path / "chunks" / ("00" if taken != "00" else "01")).write_bytes(b"a file where a folder should be")
    (sample().path(tmp_path).parent / f"{'c' * 64}.kvc").mkdir()
    _, found = await open_tier()
    assert (list(found.rows), found.damaged) == ([sample().key.digest], 1)


async def test_a_chunks_folder_that_cannot_be_listed_makes_the_store_unusable(
    open_tier: OpenTier, io: FaultyIO, tmp_path: Path
) -> None:
    io.fail("list_folder", BROKEN)
    with pytest.raises(StoreUnusable, match="Input/output error"):
        await open_tier(io)
    await open_tier()


async def test_a_cancelled_opening_gives_the_folder_back(open_tier: OpenTier, io: FaultyIO) -> None:
    io.gate("make_folder")
    opening = asyncio.ensure_future(open_tier(io))
    await io.arrived["make_folder"].acquire()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await open_tier()
