"""Chunks out of one store and into another, and archives by people who mean harm."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from chunk_files import ChunkFile, flip_byte, make_store

from kvblend.store.archive import REFUSED_SHOWN_MAX, ArchiveDamaged, ImportReport, export_chunks, import_chunks
from kvblend.store.catalog import CATALOG_NAME
from kvblend.store.errors import StoreUnusable
from kvblend.store.maintenance import check
from kvblend.store.root import claim_root, release_root
from kvblend.store.survey import Selection

ONE, TWO, THREE = (ChunkFile.make(number) for number in (1, 2, 3))


def member(name: str, raw: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(raw), kind, link
    return info, raw


def of(chunk: ChunkFile) -> tuple[tarfile.TarInfo, bytes]:
    return member(f"{chunk.key.id}.kvc", chunk.raw)


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for info, raw in members:
            archive.addfile(info, io.BytesIO(raw))
    return path


def stored(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()} - {"kvblend-store.json", "kvblend-store.lock"}


def names(*chunks: ChunkFile) -> set[str]:
    return {f"{chunk.key.id}.kvc" for chunk in chunks}


def take_in(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> ImportReport:
    return import_chunks(tmp_path / "store", write_tar(tmp_path / "a.tar", *members))


def test_an_export_imports_as_the_same_bytes(tmp_path: Path) -> None:
    root = make_store(tmp_path / "from", ONE, TWO)
    report = export_chunks(root, tmp_path / "a.tar", Selection())
    assert (report.chunks, report.file_bytes, report.damaged) == (2, len(ONE.raw) + len(TWO.raw), [])
    taken = import_chunks(tmp_path / "to", tmp_path / "a.tar")
    assert (taken.stored, taken.stored_bytes, taken.refused) == (2, report.file_bytes, 0)
    assert ONE.path(tmp_path / "to").read_bytes() == ONE.raw
    assert stored(tmp_path / "to") == names(ONE, TWO)


def test_a_chunk_that_is_there_stays(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", ONE)
    before = ONE.path(root).stat().st_ino
    assert take_in(tmp_path, of(ONE)).present == 1
    assert ONE.path(root).stat().st_ino == before


def test_a_damaged_file_in_its_place_is_replaced(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", ONE)
    flip_byte(ONE.path(root), 60)
    assert take_in(tmp_path, of(ONE)).stored == 1
    assert check(root).odd == []


def test_an_index_that_knew_the_replaced_file_goes(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", ONE)
    (root / CATALOG_NAME).write_bytes(b"index")
    take_in(tmp_path, of(TWO))
    assert (root / CATALOG_NAME).exists()
    flip_byte(ONE.path(root), 60)
    take_in(tmp_path, of(ONE))
    assert not (root / CATALOG_NAME).exists()


@pytest.mark.parametrize(
    "name",
    [
        f"/{ONE.key.id}.kvc",
        f"../{ONE.key.id}.kvc",
        f"chunks/../../{ONE.key.id}.kvc",
        f"./{ONE.key.id}.kvc",
        f"{ONE.key.id}.kvc/",
        f"{ONE.key.id}.KVC",
        f"{ONE.key.id}.tmp",
        f"{ONE.key.id.upper()}.kvc",
        f"{ONE.key.id}\n.kvc",
        "kvblend-store.json",
        "index.sqlite3",
        "",
    ],
)
def test_a_member_of_another_name_is_refused(tmp_path: Path, name: str) -> None:
    report = take_in(tmp_path, member(name, ONE.raw), of(TWO))
    assert (report.stored, report.refused) == (1, 1)
    assert stored(tmp_path / "store") == names(TWO)
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar", "store"}


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.DIRTYPE,
        tarfile.CONTTYPE,
        b"Z",
    ],
)
def test_a_member_that_is_no_plain_file_is_refused(tmp_path: Path, kind: bytes) -> None:
    report = take_in(tmp_path, member(f"{ONE.key.id}.kvc", kind=kind, link="/etc/passwd"), of(TWO))
    assert (report.stored, report.refused) == (1, 1)
    assert stored(tmp_path / "store") == names(TWO)


def test_long_names_of_other_formats_are_refused(tmp_path: Path) -> None:
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        source = write_tar(tmp_path / f"{form}.tar", member("a" * 300 + ".kvc", ONE.raw), of(TWO), form=form)
        report = import_chunks(tmp_path / f"store{form}", source)
        assert (report.stored, report.refused) == (1, 2)


def test_a_member_twice_is_taken_once(tmp_path: Path) -> None:
    report = take_in(tmp_path, of(ONE), of(ONE))
    assert (report.stored, report.refused, report.reasons[0][1]) == (1, 1, "the archive has it twice")


@pytest.mark.parametrize("at", [0, 8, 20, 60, 4096, 8192, 12288 + 5])
def test_a_damaged_member_is_refused(tmp_path: Path, at: int) -> None:
    raw = bytearray(ONE.raw)
    raw[at] ^= 1
    report = take_in(tmp_path, member(f"{ONE.key.id}.kvc", bytes(raw)), of(TWO))
    assert (report.stored, report.refused) == (1, 1)
    assert stored(tmp_path / "store") == names(TWO)


def test_a_chunk_under_another_chunks_name_is_refused(tmp_path: Path) -> None:
    report = take_in(tmp_path, member(f"{ONE.key.id}.kvc", TWO.raw))
    assert (report.reasons, stored(tmp_path / "store")) == (
        [(f"'{ONE.key.id}.kvc'", "its name is not the id of its content")],
        set(),
    )


@pytest.mark.parametrize("raw", [b"", b"\x89KVBLEND", ONE.raw[:4096], ONE.raw + bytes(4096)])
def test_a_member_of_another_size_is_refused(tmp_path: Path, raw: bytes) -> None:
    report = take_in(tmp_path, member(f"{ONE.key.id}.kvc", raw))
    assert (report.stored, report.refused, stored(tmp_path / "store")) == (0, 1, set())


def test_a_size_beyond_the_archive_is_refused_unread(tmp_path: Path) -> None:
    info = tarfile.TarInfo(f"{ONE.key.id}.kvc")
    info.size = 1 << 60
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(ArchiveDamaged, match="claims 1152921504606846976 bytes"):
        import_chunks(tmp_path / "store", tmp_path / "a.tar")
    assert not (tmp_path / "store").exists()


def test_control_characters_of_a_name_are_not_shown(tmp_path: Path) -> None:
    report = take_in(tmp_path, member("\x1b[2Jevil", b"x"))
    assert report.reasons[0][0] == r"'\x1b[2Jevil'"


def test_only_the_first_refusals_are_kept(tmp_path: Path) -> None:
    report = take_in(tmp_path, *(member(f"{number}", b"x") for number in range(REFUSED_SHOWN_MAX + 5)))
    assert (report.refused, len(report.reasons)) == (REFUSED_SHOWN_MAX + 5, REFUSED_SHOWN_MAX)


@pytest.mark.parametrize("cut_bytes", [1, 512, 1024 + 5, len(ONE.raw), len(ONE.raw) + 512])
def test_an_archive_cut_off_leaves_whole_chunks_only(tmp_path: Path, cut_bytes: int) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for chunk in (ONE, TWO):
            info, raw = of(chunk)
            archive.addfile(info, io.BytesIO(raw))
        end = archive.offset
    (tmp_path / "a.tar").write_bytes(whole.getvalue()[: end - cut_bytes])
    with pytest.raises(ArchiveDamaged) as caught:
        import_chunks(tmp_path / "store", tmp_path / "a.tar")
    assert caught.value.report.stored == 1
    assert stored(tmp_path / "store") == names(ONE)


def test_members_after_a_damaged_header_are_not_guessed_at(tmp_path: Path) -> None:
    source = write_tar(tmp_path / "a.tar", of(ONE), of(TWO), of(THREE))
    flip_byte(source, 512 + len(ONE.raw) + 3)
    with pytest.raises(ArchiveDamaged, match=f"byte {512 + len(ONE.raw)} is no member's header"):
        import_chunks(tmp_path / "store", source)
    assert stored(tmp_path / "store") == names(ONE)


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04" + bytes(900), b"\x1f\x8b" * 400, b"words " * 200, b"short"])
def test_what_is_no_tar_file_makes_no_store(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(raw)
    with pytest.raises(ArchiveDamaged):
        import_chunks(tmp_path / "store", tmp_path / "a.tar")
    assert not (tmp_path / "store").exists()


def test_a_compressed_tar_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:gz") as archive:
        archive.addfile(of(ONE)[0], io.BytesIO(ONE.raw))
    with pytest.raises(ArchiveDamaged, match="does not start as an uncompressed tar file does"):
        import_chunks(tmp_path / "store", tmp_path / "a.tar")


def test_a_pipe_or_link_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(write_tar(tmp_path / "a.tar", of(ONE)))
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            import_chunks(tmp_path / "store", tmp_path / name)


def test_an_import_does_not_follow_a_linked_folder_out(tmp_path: Path) -> None:
    root, outside = make_store(tmp_path / "store"), tmp_path / "outside"
    outside.mkdir()
    (root / "chunks").mkdir()
    (root / "chunks" / ONE.key.id[:2]).symlink_to(outside)
    with pytest.raises(StoreUnusable, match="not a folder of its own"):
        take_in(tmp_path, of(ONE))
    assert list(outside.iterdir()) == []


def test_a_full_disk_leaves_no_half_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    root = make_store(tmp_path / "store")
    (root / "chunks" / ONE.key.id[:2]).mkdir(parents=True)
    monkeypatch.setattr("kvblend.store.archive.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        take_in(tmp_path, of(ONE))
    assert stored(root) == set()


def test_a_store_in_use_takes_nothing_in(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store")
    lock = claim_root(root)
    try:
        with pytest.raises(StoreUnusable, match="in use by another process"):
            take_in(tmp_path, of(ONE))
    finally:
        release_root(lock)
