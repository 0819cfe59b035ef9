"""What a start finds: the catalog's rows and the folder's files, whichever of them a crash left behind."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvblend.store import scan
from kvblend.store.catalog import CATALOG_NAME
from kvblend.store.format import build_header, checksum
from kvblend.store.keys import pack_ids
from kvblend.store.scan import ScanReport, digests_of
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from kvblend.store.format import KVShape
    from tests.store.conftest import FaultyIO, Make, OpenStore, OpenTier, Sample


async def fill(open_store: OpenStore, root: Path, *samples: Sample) -> None:
    store = await open_store(root)
    for one in samples:
        await store.put(one.key, one.ids, one.layers)
    await store.close()


async def is_served(store: ChunkStore, one: Sample) -> bool:
    lease = await store.lease(one.key, one.ids)
    if lease is None:
        return False
    with lease:
        await lease.prefetch(range(4))
        return [bytes(await lease.layer(index)) for index in range(4)] == one.layers


async def test_a_start_opens_no_file_that_the_catalog_knows(
    open_store: OpenStore, sample: Make, io: FaultyIO, tmp_path: Path
) -> None:
    await fill(open_store, tmp_path, sample(0), sample(1))
    store = await open_store(tmp_path, io)
    assert (store.stats().chunks, store.stats().headers_read) == (2, 0)
    assert "read_heads" not in io.calls
    assert await is_served(store, sample(1))


async def test_files_that_the_catalog_does_not_know_are_read_once(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    await fill(open_store, tmp_path, sample(0))
    shutil.copy(tmp_path / CATALOG_NAME, tmp_path / "older")
    await fill(open_store, tmp_path, sample(1))
    shutil.move(tmp_path / "older", tmp_path / CATALOG_NAME)
    seen = []
    for _ in range(2):
        store = await open_store(tmp_path)
        seen.append((store.stats().chunks, store.stats().headers_read))
        assert await is_served(store, sample(1))
        await store.close()
    assert seen == [(2, 1), (2, 0)]


async def test_rows_whose_file_is_gone_are_dropped(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    await fill(open_store, tmp_path, sample(0), sample(1))
    os.remove(sample(0).path(tmp_path))
    store = await open_store(tmp_path)
    assert [store.contains(sample(number).key) for number in range(2)] == [False, True]
    await store.close()
    with sqlite3.connect(tmp_path / CATALOG_NAME) as connection:
        assert connection.execute("SELECT count(*) FROM chunks").fetchone() == (1,)
    connection.close()


@pytest.mark.parametrize("harm", ["missing", "damaged"])
async def test_the_catalog_is_rebuilt_from_the_files(
    open_store: OpenStore,
    sample: Make,
    tmp_path: Path,
    harm: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "SLOW_FILES", 2)
    await fill(open_store, tmp_path, *(sample(number) for number in range(3)))
    if harm == "missing":
        os.remove(tmp_path / CATALOG_NAME)
    else:
        (tmp_path / CATALOG_NAME).write_bytes(b"SQLite format 3\0" + bytes(5000))
    caplog.clear()
    store = await open_store(tmp_path)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert all([await is_served(store, sample(number)) for number in range(3)])
    await store.close()
    assert (await open_store(tmp_path)).stats().headers_read == 0


async def test_another_models_files_are_read_once_and_left_alone(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    await fill(open_store, tmp_path, sample(0), sample(1))
    os.remove(tmp_path / CATALOG_NAME)
    seen = []
    for _ in range(2):
        store = await open_store(tmp_path, fingerprint="model-b")
        seen.append((store.stats().chunks, store.stats().foreign, store.stats().headers_read))
        await store.close()
    assert seen == [(0, 2, 2), (0, 2, 0)]
    store = await open_store(tmp_path)
    assert (store.stats().chunks, store.stats().headers_read) == (2, 0)
    assert await is_served(store, sample(0))


@pytest.mark.parametrize("version", [0, 3, 1 << 31])
async def test_a_file_of_another_format_version_is_left_alone_and_counted(
    open_store: OpenStore, sample: Make, tmp_path: Path, version: int
) -> None:
    await fill(open_store, tmp_path, sample())
    raw = bytearray(sample().path(tmp_path).read_bytes())
    raw[8:12] = struct.pack("<I", version)
    sample().path(tmp_path).write_bytes(raw)
    os.remove(tmp_path / CATALOG_NAME)
    for _ in range(2):
        store = await open_store(tmp_path)
        assert (store.stats().chunks, store.stats().foreign, store.stats().damaged) == (0, 1, 0)
        assert not await is_served(store, sample())
        await store.close()
    assert sample().path(tmp_path).read_bytes() == raw


async def test_a_file_that_changed_its_version_behind_the_catalog_is_a_miss(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    await fill(open_store, tmp_path, sample())
    raw = bytearray(sample().path(tmp_path).read_bytes())
    raw[8] = 3
    sample().path(tmp_path).write_bytes(raw)
    store = await open_store(tmp_path)
    assert not await is_served(store, sample())
    await store.close()
    assert sample().path(tmp_path).read_bytes() == raw


async def test_files_of_one_chunk_in_another_folder_are_damaged(
    open_tier: OpenTier, sample: Make, shape: KVShape, tmp_path: Path
) -> None:
    await open_tier()
    one = sample()
    header, region = build_header(one.key, pack_ids(one.ids), shape, [checksum(b"")] * 4)
    folder = tmp_path / "chunks" / ("00" if one.key.id[:2] != "00" else "01")
    folder.mkdir()
    (folder / f"{one.key.id}.kvc").write_bytes(region + bytes(header.data_bytes))
    _, found = await open_tier()
    assert found == ScanReport({}, damaged=1)


@pytest.mark.parametrize("name", ["A" * 64, "g" * 64, "a" * 63, " " * 2 + "a" * 62, "a" * 62 + "  "])
async def test_names_that_no_store_gives_are_passed_over(open_tier: OpenTier, tmp_path: Path, name: str) -> None:
    await open_tier()
    (tmp_path / "chunks" / "aa").mkdir()
    for suffix in (".kvc", ".tmp", ".KVC"):
        (tmp_path / "chunks" / "aa" / (name + suffix)).write_bytes(b"mine")
    _, found = await open_tier()
    assert found == ScanReport()
    assert len(os.listdir(tmp_path / "chunks" / "aa")) == 3


async def test_odd_names_do_not_hide_a_chunk(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    await fill(open_store, tmp_path, sample())
    folder = sample().path(tmp_path).parent
    (folder / ("g" * 64 + ".kvc")).write_bytes(b"mine")
    (folder / ("a" * 62 + "  .kvc")).write_bytes(b"mine")
    store = await open_store(tmp_path)
    assert (store.stats().chunks, store.stats().headers_read) == (1, 0)


ID = "ab" + "0123456789abcdef" * 3 + "0" * 14


def test_names_of_chunk_files_are_digests() -> None:
    other = ID[:-1] + "f"
    assert digests_of([], "ab") == []
    assert digests_of([f"{ID}.kvc", f"{other}.kvc"], "ab") == [bytes.fromhex(ID), bytes.fromhex(other)]


@pytest.mark.parametrize(
    "names",
    [
        [f"{ID}.tmp"], [f"{ID}.kvc", f"{ID}.tmp"], [f".kvc{ID}"], [f"{ID.upper()}.kvc"], [f"{ID[:-1]} .kvc"],
        [f"{ID[:-1]}.kvc", f"{ID}0.kvc"], [f"{ID[:-2]}x0.kvc"], [f"{ID[:32]}.kvc{ID[32:]}"], ["cd" + ID[2:] + ".kvc"],
        [f"{ID}.kvc", ""], [f"{ID[:-1]}\uff10.kvc"],
    ],
)  # fmt: skip
def test_other_names_in_a_folder_are_looked_at_one_by_one(names: list[str]) -> None:
    assert digests_of(names, "ab") is None


async def test_odd_names_beside_chunks_do_no_harm(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    await fill(open_store, tmp_path, sample(0), sample(1))
    for number in range(2):
        folder = sample(number).path(tmp_path).parent
        for name in ("x", ".kvc" + "0" * 64, f"{sample(number).key.id.upper()}.kvc", f"{'0' * 64}.tmp"):
            (folder / name).write_bytes(b"")
    store = await open_store(tmp_path)
    assert (store.stats().chunks, store.stats().headers_read, store.stats().damaged) == (2, 0, 0)
    assert not any(sample(number).path(tmp_path).with_name(f"{'0' * 64}.tmp").exists() for number in range(2))
