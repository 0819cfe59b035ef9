"""What an export writes, leaves out and refuses."""

from __future__ import annotations

import asyncio
import os
import tarfile
from pathlib import Path

import pytest
from chunk_files import SHAPE, ChunkFile, flip_byte, make_store

from kvblend.store.archive import export_chunks, import_chunks
from kvblend.store.notes import write_note
from kvblend.store.store import ChunkStore
from kvblend.store.survey import BadOrder, Selection

ONE, TWO = ChunkFile.make(1), ChunkFile.make(2)


def test_an_export_is_a_plain_tar_of_chunk_files(tmp_path: Path) -> None:
    export_chunks(make_store(tmp_path / "from", ONE), tmp_path / "a.tar", Selection())
    with tarfile.open(tmp_path / "a.tar", "r:") as archive:
        (info,) = archive.getmembers()
    assert (info.name, info.size, info.type) == (f"{ONE.key.id}.kvc", len(ONE.raw), tarfile.REGTYPE)


def test_an_export_takes_only_what_is_selected(tmp_path: Path) -> None:
    ann = ChunkFile.make(1, salt="ann")
    report = export_chunks(make_store(tmp_path / "from", ONE, ann), tmp_path / "a.tar", Selection(tenant="ann"))
    taken = import_chunks(tmp_path / "to", tmp_path / "a.tar")
    assert (report.chunks, taken.stored, ann.path(tmp_path / "to").exists()) == (1, 1, True)


def test_an_export_leaves_damaged_chunks_out(tmp_path: Path) -> None:
    root = make_store(tmp_path / "from", ONE, TWO)
    flip_byte(ONE.path(root), 4096)
    report = export_chunks(root, tmp_path / "a.tar", Selection())
    assert (report.chunks, report.damaged) == (1, [(ONE.key.id, "the checksum of layer 0 does not match")])


def test_an_export_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_text("mine")
    with pytest.raises(BadOrder, match="exists already"):
        export_chunks(make_store(tmp_path / "from", ONE), tmp_path / "a.tar", Selection())
    assert (tmp_path / "a.tar").read_text() == "mine"


def test_an_export_into_the_store_is_refused(tmp_path: Path) -> None:
    root = make_store(tmp_path / "from", ONE)
    with pytest.raises(BadOrder, match="lies in the store itself"):
        export_chunks(root, root / "a.tar", Selection())


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    root = make_store(tmp_path / "from", ONE)
    with pytest.raises(OSError, match="No space left"):
        export_chunks(root, tmp_path / "a.tar", Selection())
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_an_unknown_id_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    root = make_store(tmp_path / "from", ONE)
    with pytest.raises(BadOrder, match="not that of a stored chunk"):
        export_chunks(root, tmp_path / "a.tar", Selection(ids=frozenset({"0" * 64})))
    assert not (tmp_path / "a.tar").exists()


async def test_what_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    """Token ids can be read as text: whatever the umask says, nobody else may read a store."""
    one = ChunkFile.make(1)
    before = os.umask(0)
    try:
        async with await ChunkStore.open(tmp_path / "kv", SHAPE, "model-a", 1 << 20) as store:
            await store.put(one.key, one.ids, [bytearray(layer) for layer in one.layers])
            await asyncio.to_thread(write_note, tmp_path / "kv", "gate", {})
            modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "kv").rglob("*")}
        await asyncio.to_thread(export_chunks, tmp_path / "kv", tmp_path / "a.tar", Selection())
        await asyncio.to_thread(import_chunks, tmp_path / "other", tmp_path / "a.tar")
    finally:
        os.umask(before)
    for path in (tmp_path / "kv", tmp_path / "a.tar", tmp_path / "other", *(tmp_path / "other").rglob("*")):
        modes[path] = path.stat().st_mode & 0o777
    assert {path.name: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    assert any(path.suffix == ".kvc" for path in modes)
    assert any(path.name.startswith("index.sqlite3") for path in modes)
