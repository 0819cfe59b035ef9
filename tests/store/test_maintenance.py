"""Check, repair, evict and clear on a folder that nobody else uses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from chunk_files import SHAPE, ChunkFile, flip_byte, make_store, write_old

from kvblend.store.catalog import CATALOG_NAME
from kvblend.store.errors import ChunkError, StoreUnusable
from kvblend.store.maintenance import check, claimed, clear, evict, own_folder
from kvblend.store.root import claim_root, release_root
from kvblend.store.store import ChunkStore
from kvblend.store.survey import BadOrder, Selection, verify_file


def files(root: Path) -> set[str]:
    return {path.name for path in (root / "chunks").rglob("*") if path.is_file()}


def aged(root: Path, *ages_s: int) -> list[ChunkFile]:
    """Chunks written so many seconds after the epoch."""
    chunks = [ChunkFile.make(number).write(make_store(root)) for number in range(len(ages_s))]
    for chunk, age in zip(chunks, ages_s, strict=True):
        os.utime(chunk.path(root), (age, age))
    return chunks


def test_a_sound_store_checks_clean(tmp_path: Path) -> None:
    make_store(tmp_path, ChunkFile.make(1), ChunkFile.make(2, fingerprint="model-b"))
    found = check(tmp_path)
    assert (len(found.chunks), found.odd) == (2, [])


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    flip_byte(one.path(tmp_path), 4096)
    (tmp_path / CATALOG_NAME).write_bytes(b"index")
    assert [file.kind for file in check(tmp_path).odd] == ["damaged"]
    assert files(tmp_path) == {f"{one.key.id}.kvc"}
    assert (tmp_path / CATALOG_NAME).exists()


@pytest.mark.parametrize("at", [0, 8, 12, 16, 48, 100, 4096, 8192 + 7, 12288])
def test_no_flipped_bit_passes_a_check(tmp_path: Path, at: int) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    flip_byte(one.path(tmp_path), at)
    found = check(tmp_path)
    assert (found.chunks, len(found.odd)) == ([], 1)


def test_repair_sets_damaged_files_aside(tmp_path: Path) -> None:
    one, two = ChunkFile.make(1), ChunkFile.make(2)
    make_store(tmp_path, one, two)
    flip_byte(one.path(tmp_path), 4096)
    check(tmp_path, repair=True)
    assert files(tmp_path) == {f"{two.key.id}.kvc"}
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [f"{one.key.id}.kvc"]


def test_repair_removes_leftovers_and_the_index(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    one.path(tmp_path).with_suffix(".tmp").write_bytes(b"half")
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / (CATALOG_NAME + suffix)).write_bytes(b"index")
    check(tmp_path, repair=True)
    assert files(tmp_path) == {f"{one.key.id}.kvc"}
    assert not list(tmp_path.glob(CATALOG_NAME + "*"))


def test_repair_leaves_other_versions_and_strays(tmp_path: Path) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    flip_byte(one.path(tmp_path), 8)
    (one.path(tmp_path).parent / "notes.txt").write_text("mine")
    check(tmp_path, repair=True)
    assert files(tmp_path) == {f"{one.key.id}.kvc", "notes.txt"}


def test_old_chunks_stay_until_they_are_to_be_removed(tmp_path: Path) -> None:
    one, old = ChunkFile.make(1), ChunkFile.make(2)
    path = write_old(make_store(tmp_path, one), old)
    check(tmp_path, repair=True)
    assert path.exists()
    assert len(check(tmp_path, remove_old=True).odd_of("old")) == 1
    assert files(tmp_path) == {f"{one.key.id}.kvc"}


def test_clearing_removes_old_chunks(tmp_path: Path) -> None:
    write_old(make_store(tmp_path), ChunkFile.make())
    clear(tmp_path)
    assert files(tmp_path) == set()


def test_repair_does_not_move_files_out_through_a_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    one = ChunkFile.make().write(make_store(root))
    flip_byte(one.path(root), 4096)
    (root / "damaged").symlink_to(outside)
    with pytest.raises(StoreUnusable, match="damaged is not a folder of its own"):
        check(root, repair=True)
    assert list(outside.iterdir()) == []


def test_eviction_to_a_size_takes_the_longest_stored(tmp_path: Path) -> None:
    chunks = aged(tmp_path, 300, 100, 200)
    each = len(chunks[0].raw)
    removal = evict(tmp_path, Selection(), bytes_max=each)
    assert removal == (2, 2 * each, 1, each)
    assert files(tmp_path) == {f"{chunks[0].key.id}.kvc"}


def test_a_store_below_the_size_keeps_everything(tmp_path: Path) -> None:
    chunks = aged(tmp_path, 1, 2)
    assert evict(tmp_path, Selection(), bytes_max=2 * len(chunks[0].raw)).chunks == 0


def test_eviction_by_age(tmp_path: Path) -> None:
    chunks = aged(tmp_path, 100, 300)
    evict(tmp_path, Selection(stored_before=200.0))
    assert files(tmp_path) == {f"{chunks[1].key.id}.kvc"}


def test_eviction_by_tenant_and_model(tmp_path: Path) -> None:
    kept, gone = ChunkFile.make(1, salt="bob"), ChunkFile.make(1, salt="ann")
    make_store(tmp_path, kept, gone, ChunkFile.make(2, salt="ann", fingerprint="model-b"))
    assert evict(tmp_path, Selection(tenant="ann", fingerprint="model-a")).chunks == 1
    assert not gone.path(tmp_path).exists()
    assert kept.path(tmp_path).exists()


def test_eviction_by_id(tmp_path: Path) -> None:
    one, two = aged(tmp_path, 1, 2)
    evict(tmp_path, Selection(ids=frozenset({one.key.id})))
    assert files(tmp_path) == {f"{two.key.id}.kvc"}


@pytest.mark.parametrize("chunk_id", ["0" * 64, "../../etc/passwd", "a/b", "..", "", "A" * 64])
def test_an_id_that_is_not_stored_is_refused_before_anything_goes(tmp_path: Path, chunk_id: str) -> None:
    (one,) = aged(tmp_path, 1)
    with pytest.raises(BadOrder, match="is not that of a stored chunk"):
        evict(tmp_path, Selection(ids=frozenset({one.key.id, chunk_id})))
    assert one.path(tmp_path).exists()


def test_a_negative_size_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    with pytest.raises(BadOrder, match="bytes_max is -1"):
        evict(tmp_path, Selection(), bytes_max=-1)


def test_clearing_leaves_an_empty_store(tmp_path: Path) -> None:
    one, two = aged(tmp_path, 1, 2)
    flip_byte(two.path(tmp_path), 50)
    one.path(tmp_path).with_suffix(".tmp").write_bytes(b"half")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / f"{one.key.id}.kvc").write_bytes(b"old")
    assert clear(tmp_path).chunks == 1
    assert files(tmp_path) == set()
    assert list((tmp_path / "damaged").iterdir()) == []
    release_root(claim_root(tmp_path))


def test_clearing_leaves_strays(tmp_path: Path) -> None:
    aged(tmp_path, 1)
    (tmp_path / "chunks" / "readme").write_text("mine")
    clear(tmp_path)
    assert files(tmp_path) == {"readme"}


@pytest.mark.parametrize("work", [check, clear, lambda root: evict(root, Selection())])
def test_a_store_in_use_is_refused(tmp_path: Path, work: Callable[[Path], object]) -> None:
    one = ChunkFile.make().write(make_store(tmp_path))
    lock = claim_root(tmp_path)
    try:
        with pytest.raises(StoreUnusable, match="in use by another process"):
            work(tmp_path)
    finally:
        release_root(lock)
    assert one.path(tmp_path).exists()


def test_a_claim_does_not_make_a_store_unless_asked(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="does not exist"), claimed(tmp_path / "a"):
        pass
    with claimed(tmp_path / "a", create=True):
        assert (tmp_path / "a").is_dir()


def test_a_claim_ends_with_its_block(tmp_path: Path) -> None:
    make_store(tmp_path)
    with claimed(tmp_path):
        pass
    release_root(claim_root(tmp_path))


def test_an_own_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("x")
    with pytest.raises(StoreUnusable, match="chunks is not a folder of its own"):
        own_folder(tmp_path, "chunks")


def test_no_flipped_byte_of_any_field_passes_a_check(tmp_path: Path) -> None:
    one = ChunkFile.make()
    path = one.write(make_store(tmp_path)).path(tmp_path)
    length, kv = len(one.raw), len(one.layers[0])
    inside = [at for start in range(4096, length, 4096) for at in range(start, start + kv, 7)]
    for at in (*range(600), *range(600, 4096, 97), *inside):
        raw = bytearray(one.raw)
        raw[at] ^= 1 << at % 8
        path.write_bytes(raw)
        with pytest.raises(ChunkError):
            verify_file(path)


def test_the_next_opener_finds_what_maintenance_left(tmp_path: Path) -> None:
    async def chunks_of() -> tuple[int, int, int]:
        async with await ChunkStore.open(tmp_path, SHAPE, "model-a", 1 << 20) as store:
            stats = store.stats()
        return stats.chunks, stats.damaged, stats.headers_read

    chunks = aged(tmp_path, 1, 2, 3)
    assert asyncio.run(chunks_of()) == (3, 0, 3)
    evict(tmp_path, Selection(ids=frozenset({chunks[0].key.id})))
    assert asyncio.run(chunks_of()) == (2, 0, 0)
    flip_byte(chunks[1].path(tmp_path), 4096)
    check(tmp_path, repair=True)
    assert asyncio.run(chunks_of()) == (1, 0, 1)
    clear(tmp_path)
    assert asyncio.run(chunks_of()) == (0, 0, 0)
