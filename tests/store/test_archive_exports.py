"""What an export writes, leaves out and refuses."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from chunk_files import ChunkFile, flip_byte, make_store

from kvblend.store.archive import export_chunks, import_chunks
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
