"""Damaged files are kept for a look, within limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chunk_files import ChunkFile, flip_byte, make_store

from kvblend.store import aside
from kvblend.store.aside import Aside, aside_bytes_max, count_aside, trim_aside
from kvblend.store.maintenance import check

if TYPE_CHECKING:
    from tests.store.conftest import Make, OpenStore


def fill(folder: Path, *sizes: int) -> list[Path]:
    """Files that came here one after another."""
    folder.mkdir()
    paths = []
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.kvc")
        paths[-1].write_bytes(bytes(size))
        wait_for_the_clock(paths[-1])
    return paths


def wait_for_the_clock(path: Path) -> None:
    """Touch a file until its time differs: the kernel's clock for files is coarse."""
    first = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == first:
        os.utime(path)


@pytest.mark.parametrize(
    ("bytes_max", "files_max", "left"),
    [(100, 3, [0, 1, 2]), (29, 3, [1, 2]), (100, 2, [1, 2]), (100, 1, [2]), (9, 3, []), (0, 0, [])],
)
def test_the_oldest_leave_until_both_limits_are_kept(
    tmp_path: Path, bytes_max: int, files_max: int, left: list[int]
) -> None:
    paths = fill(tmp_path / "damaged", 10, 10, 10)
    assert trim_aside(tmp_path / "damaged", bytes_max, files_max) == Aside(len(left), 10 * len(left))
    assert [path.exists() for path in paths] == [number in left for number in range(3)]


def test_a_missing_folder_is_empty_and_not_made(tmp_path: Path) -> None:
    assert trim_aside(tmp_path / "damaged") == count_aside(tmp_path / "damaged") == Aside(0, 0)
    assert not (tmp_path / "damaged").exists()


def test_links_and_folders_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "damaged" / "folder").mkdir(parents=True)
    (tmp_path / "mine").write_bytes(b"x")
    (tmp_path / "damaged" / "link.kvc").symlink_to(tmp_path / "mine")
    assert trim_aside(tmp_path / "damaged", 0, 0) == Aside(0, 0)
    assert (tmp_path / "damaged" / "link.kvc").is_symlink()


async def test_a_link_in_place_of_the_folder_is_not_followed(open_store: OpenStore, tmp_path: Path) -> None:
    foreign = fill(tmp_path / "foreign", *[1] * (aside.FILES_MAX + 1))
    await (await open_store(tmp_path / "store")).close()
    (tmp_path / "store" / "damaged").symlink_to(tmp_path / "foreign")
    store = await open_store(tmp_path / "store")
    assert all(path.exists() for path in foreign)
    assert store.stats().aside_files == 0


async def test_a_file_in_place_of_the_folder_does_not_stop_the_start(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await (await open_store(tmp_path)).close()
    (tmp_path / "damaged").write_bytes(b"mine")
    store = await open_store(tmp_path)
    assert store.stats().aside_files == 0
    assert "is not a folder of its own" in caplog.text


@pytest.mark.parametrize(("budget", "room"), [(None, 256 << 20), (1 << 20, 1 << 16), (1 << 40, 256 << 20)])
def test_with_a_small_budget_less_is_kept(budget: int | None, room: int) -> None:
    assert aside_bytes_max(budget) == room


async def test_a_store_keeps_few_damaged_files_and_counts_them(
    open_store: OpenStore, sample: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside.trim_aside, "__defaults__", (aside.BYTES_MAX, 2))
    store = await open_store(tmp_path)
    for number in range(4):
        one = sample(number)
        await store.put(one.key, one.ids, one.layers)
        store.evict_nowait(one.key.id)
        flip_byte(one.path(tmp_path), 100)
        assert await store.lease(one.key, one.ids) is None
    await store.close()
    stats = store.stats()
    assert (stats.damaged, stats.aside_files) == (4, 2)
    assert stats.aside_bytes == sum(path.stat().st_size for path in (tmp_path / "damaged").iterdir()) > 0
    store = await open_store(tmp_path, disk_bytes_budget=1 << 20)
    assert (store.stats().aside_files, store.stats().aside_bytes) == (2, stats.aside_bytes)
    await store.close()
    store = await open_store(tmp_path, disk_bytes_budget=16 * 4096)
    assert store.stats().aside_files == 0


def test_a_repair_keeps_few_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside.trim_aside, "__defaults__", (aside.BYTES_MAX, 1))
    chunks = [ChunkFile.make(number) for number in range(3)]
    make_store(tmp_path, *chunks)
    for chunk in chunks:
        flip_byte(chunk.path(tmp_path), 100)
    assert len(check(tmp_path, repair=True).odd_of("damaged")) == 3
    assert count_aside(tmp_path / "damaged").files == 1
