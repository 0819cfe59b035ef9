from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvblend.store.errors import ChunkDamaged
from kvblend.store.files import AiofilesIO, DiskIO, FileHead, FileRead
from kvblend.store.format import Buffer, KVShape, build_header
from kvblend.store.keys import ChunkKey, pack_ids


@pytest.fixture
async def disk() -> AsyncIterator[DiskIO]:
    real = AiofilesIO()
    yield real
    await real.close()


async def head_of(disk: DiskIO, path: Path) -> FileHead | OSError:
    return (await disk.read_heads([path]))[0]


async def test_parts_become_one_file(disk: DiskIO, tmp_path: Path) -> None:
    parts: list[Buffer] = [b"ab", bytearray(b"cd"), memoryview(bytearray(b"efgh")).cast("B", (2, 2))]
    assert await disk.write_file(tmp_path / "f", parts) == 8
    assert (tmp_path / "f").read_bytes() == b"abcdefgh"


async def test_writing_replaces_what_was_there(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    assert await disk.write_file(tmp_path / "f", [b"x"]) == 1


async def test_writing_does_not_follow_a_link(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "f").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links") as caught:
        await disk.write_file(tmp_path / "f", [b"x"])
    assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "target").read_bytes() == b"precious"


async def test_reading_fills_the_view_from_the_offset(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    view = memoryview(bytearray(4))
    assert await disk.read_into([FileRead(tmp_path / "f", 3, view)]) == [4]
    assert bytes(view) == b"3456"


async def test_what_comes_behind_a_read_runs_in_another_thread_once_the_view_is_full(
    disk: DiskIO, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    view = memoryview(bytearray(4))
    seen: list[tuple[bytes, bool]] = []

    def look() -> None:
        seen.append((bytes(view), threading.current_thread() is threading.main_thread()))

    await disk.read_into([FileRead(tmp_path / "f", 3, view, look)])
    await disk.read_into([FileRead(tmp_path / "f", 8, view, look)])
    assert seen == [(b"3456", False)]


async def test_what_comes_behind_a_read_may_refuse_it(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")

    def refuse() -> None:
        raise ChunkDamaged("these are not the bytes")

    (refused,) = await disk.read_into([FileRead(tmp_path / "f", 3, memoryview(bytearray(4)), refuse)])
    assert isinstance(refused, ChunkDamaged)


async def test_a_read_that_fails_leaves_the_others_as_they_are(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    views = [memoryview(bytearray(2)) for _ in range(3)]
    names = ("f", "gone", "f")
    first, lost, last = await disk.read_into(
        [FileRead(tmp_path / name, 2 * at, view) for at, (name, view) in enumerate(zip(names, views, strict=True))]
    )
    assert (first, last) == (2, 2)
    assert isinstance(lost, FileNotFoundError)
    assert [bytes(view) for view in views] == [b"01", bytes(2), b"45"]


async def test_reading_past_the_end_is_short(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"01234")
    assert await disk.read_into([FileRead(tmp_path / "f", 3, memoryview(bytearray(4)))]) == [2]


async def test_a_pipe_is_refused_without_waiting_for_it(disk: DiskIO, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    (refused,) = await disk.read_into([FileRead(tmp_path / "f", 0, memoryview(bytearray(4)))])
    assert "not a regular file" in str(refused)


async def test_a_head_is_the_header_region_and_the_size(disk: DiskIO, tmp_path: Path, shape: KVShape) -> None:
    ids = tuple(range(3000))
    _, region = build_header(ChunkKey.of("fp", "", (), ids), pack_ids(ids), shape, [bytes(32)] * shape.num_layers)
    (tmp_path / "f").write_bytes(region + bytes(9000))
    assert len(region) > 3 * 4096
    assert await head_of(disk, tmp_path / "f") == FileHead(region, len(region) + 9000)


async def test_the_head_of_another_file_is_its_first_page(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 5000)
    assert await head_of(disk, tmp_path / "f") == FileHead(b"x" * 4096, 5000)


async def test_one_unreadable_head_does_not_hide_the_others(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    missing, there = await disk.read_heads([tmp_path / "missing", tmp_path / "f"])
    assert isinstance(missing, FileNotFoundError)
    assert there == FileHead(b"x", 1)


async def test_rename_replaces_and_remove_forgives(disk: DiskIO, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    await disk.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"a"
    await disk.remove(tmp_path / "b")
    await disk.remove(tmp_path / "b")
    assert await disk.list_folder(tmp_path) == []


async def test_folders_are_made_once_and_synced(disk: DiskIO, tmp_path: Path) -> None:
    await disk.make_folder(tmp_path / "x")
    await disk.make_folder(tmp_path / "x")
    await disk.sync_folder(tmp_path / "x")
    assert await disk.list_folder(tmp_path) == ["x"]


async def test_jobs_run_in_threads_of_the_store(disk: DiskIO) -> None:
    name = await disk.compute(lambda: threading.current_thread().name)
    assert name.startswith("kvblend-store")


async def test_closing_ends_the_threads() -> None:
    disk = AiofilesIO()
    thread = await disk.compute(threading.current_thread)
    await disk.close()
    assert not thread.is_alive()


async def test_closing_unused_files_is_fine() -> None:
    await AiofilesIO().close()


async def test_files_are_fsynced(disk: DiskIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    folder = os.stat(tmp_path).st_ino
    await disk.write_file(tmp_path / "f", [b"x"])
    await disk.sync_folder(tmp_path)
    assert synced == [(tmp_path / "f").stat().st_ino, folder]


async def test_folders_are_listed_together_and_fail_each_alone(disk: AiofilesIO, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    first, missing, last = await disk.list_folders([tmp_path / "a", tmp_path / "no", tmp_path / "b"])
    assert (first, last) == (["x"], ["x"])
    assert isinstance(missing, FileNotFoundError)
