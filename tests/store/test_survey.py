"""What a look at the files of a store folder tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from chunk_files import ChunkFile, flip_byte, make_store, write_old

from kvblend.store.errors import ChunkDamaged, StoreUnusable
from kvblend.store.keys import tenant_of, tenant_tag
from kvblend.store.root import claim_root, release_root
from kvblend.store.survey import Selection, read_header, require_store, survey, verify_file


def kinds(root: Path) -> list[tuple[str, str]]:
    return [(file.kind, file.path.name) for file in survey(root).odd]


def test_chunks_of_all_models_and_tenants_are_found(tmp_path: Path) -> None:
    one, two = ChunkFile.make(1), ChunkFile.make(2, tokens=9, fingerprint="model-b", salt="ann")
    make_store(tmp_path, one, two)
    found = {chunk.id: chunk for chunk in survey(tmp_path).chunks}
    assert {(c.fingerprint, c.tenant, c.num_tokens, c.file_bytes) for c in found.values()} == {
        ("model-a", "", 5, len(one.raw)),
        ("model-b", tenant_of("ann"), 9, len(two.raw)),
    }
    assert set(found) == {one.key.id, two.key.id}


def test_a_store_in_use_can_be_looked_at(tmp_path: Path) -> None:
    make_store(tmp_path, ChunkFile.make())
    lock = claim_root(tmp_path)
    try:
        assert len(survey(tmp_path).chunks) == 1
    finally:
        release_root(lock)


def test_a_flipped_header_bit_is_damage(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    flip_byte(one.path(tmp_path), 60)
    assert kinds(tmp_path) == [("damaged", f"{one.key.id}.kvc")]


def test_a_file_of_another_version_is_foreign(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    flip_byte(one.path(tmp_path), 8)
    assert kinds(tmp_path) == [("foreign", f"{one.key.id}.kvc")]


def test_a_chunk_of_version_1_with_a_salt_is_old(tmp_path: Path) -> None:
    path = write_old(make_store(tmp_path), ChunkFile.make())
    (found,) = survey(tmp_path).odd
    assert (found.kind, found.path, found.version) == ("old", path, 1)
    assert "version 1 and holds a salt" in found.reason


def test_a_leftover_write_is_temporary(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    one.path(tmp_path).rename(one.path(tmp_path).with_suffix(".tmp"))
    assert kinds(tmp_path) == [("temporary", f"{one.key.id}.tmp")]


def test_a_chunk_in_the_wrong_folder_is_damage(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    wrong = tmp_path / "chunks" / ("00" if one.key.id[:2] != "00" else "01")
    wrong.mkdir()
    one.path(tmp_path).rename(wrong / one.path(tmp_path).name)
    assert kinds(tmp_path) == [("damaged", f"{one.key.id}.kvc")]


@pytest.mark.parametrize("name", ["ab/notes.txt", "readme", "ab/mine.kvc"])
def test_a_file_named_by_hand_is_a_stray(tmp_path: Path, name: str) -> None:
    make_store(tmp_path)
    (tmp_path / "chunks" / "ab").mkdir(parents=True)
    (tmp_path / "chunks" / name).write_bytes(b"mine")
    assert kinds(tmp_path) == [("stray", Path(name).name)]


def test_a_chunk_renamed_by_hand_is_damage(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    other = one.path(tmp_path).with_name(one.key.id[:2] + "0" * 62 + ".kvc")
    one.path(tmp_path).rename(other)
    assert [(file.kind, file.reason) for file in survey(tmp_path).odd] == [
        ("damaged", "its name is not the id of its content")
    ]


def test_linked_folders_and_files_are_not_followed(tmp_path: Path) -> None:
    elsewhere = make_store(tmp_path / "other", ChunkFile.make())
    root = make_store(tmp_path / "store")
    (root / "chunks").mkdir()
    name = ChunkFile.make().key.id
    (root / "chunks" / name[:2]).symlink_to(elsewhere / "chunks" / name[:2])
    (root / "chunks" / "00").mkdir(exist_ok=True)
    assert survey(root).chunks == []


def test_a_flipped_payload_bit_is_seen_by_a_full_check_only(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    flip_byte(one.path(tmp_path), 4096 + 4096 + 3)
    assert read_header(one.path(tmp_path)).key == one.key
    with pytest.raises(ChunkDamaged, match="layer 1"):
        verify_file(one.path(tmp_path))


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    make_store(tmp_path, ChunkFile.make(1), ChunkFile.make(2))
    heard: list[tuple[int, int]] = []
    survey(tmp_path, lambda done, total: heard.append((done, total)))
    assert heard == [(1, 2), (2, 2)]


def test_a_tenant_is_selected_by_salt_or_tag(tmp_path: Path) -> None:
    make_store(tmp_path, ChunkFile.make(1, salt="ann"), ChunkFile.make(2, salt="bob"), ChunkFile.make(3))
    chunks = survey(tmp_path).chunks
    for tenant in ("ann", tenant_tag("ann")):
        assert [chunk.tenant for chunk in chunks if Selection(tenant=tenant).holds(chunk)] == [tenant_of("ann")]
    for tenant in ("", "-"):
        assert [chunk.tenant for chunk in chunks if Selection(tenant=tenant).holds(chunk)] == [""]


def test_a_missing_folder_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="does not exist"):
        require_store(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnusable, match="not a folder"):
        require_store(tmp_path / "file")


def test_an_empty_folder_is_no_store_and_stays_empty(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="it is empty"):
        require_store(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_folder_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("x")
    with pytest.raises(StoreUnusable, match="neither empty nor a kvblend store"):
        require_store(tmp_path)
