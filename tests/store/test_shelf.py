from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvblend.store.errors import ChunkDamaged
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from tests.store.conftest import Make, OpenStore, Sample


async def stored(open_store: OpenStore, root: Path, one: Sample) -> ChunkStore:
    store = await open_store(root, disk_bytes_budget=1 << 20, tenant_bytes_max=1 << 20)
    await store.put(one.key, one.ids, one.layers)
    return store


async def test_every_book_hears_of_a_chunk(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await stored(open_store, tmp_path, sample())
    shelf, digest = store._shelf, sample().key.digest
    assert digest in shelf.index
    assert digest in shelf.space._all
    assert shelf.unlist(digest)
    assert (len(shelf.index), len(shelf.space._all), shelf.space._tenants, shelf.pool.get(digest)) == (0, 0, {}, None)
    await store.close()
    assert shelf.disk is not None
    assert digest not in shelf.disk.catalog._changes


async def test_a_chunk_that_is_leased_when_it_is_listed_may_not_go(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await stored(open_store, tmp_path, sample())
    shelf, digest = store._shelf, sample().key.digest
    row = shelf.index.get(digest)
    assert row is not None
    lease = await store.lease(sample().key, sample().ids)
    assert lease is not None
    with lease:
        shelf._unlist_row(digest)
        shelf.enlist(digest, row)
        assert shelf.space._all.free_bytes == 0
    assert shelf.space._all.free_bytes == row.file_bytes


async def test_leases_are_counted_in_the_row(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await stored(open_store, tmp_path, sample())
    for _ in range(3):
        lease = await store.lease(sample().key, sample().ids)
        assert lease is not None
        lease.release()
    row = store._shelf.index.get(sample().key.digest)
    assert row is not None
    assert row.hits == 3
    assert row.used_s >= row.created_s > 0


async def test_an_error_about_an_entry_that_was_replaced_forgets_nothing(
    open_store: OpenStore, sample: Make, tmp_path: Path
) -> None:
    store = await stored(open_store, tmp_path, sample())
    old = store._shelf.pool.get(sample().key.digest)
    assert old is not None
    await store.delete(sample().key.id)
    await store.put(sample().key, sample().ids, sample().layers)
    store._shelf.forget(old, ChunkDamaged("the old file"))
    assert store.contains(sample().key)
    assert store.stats().damaged == 0


async def test_the_index_is_put_right_by_a_header(open_store: OpenStore, sample: Make, tmp_path: Path) -> None:
    store = await stored(open_store, tmp_path, sample())
    shelf, digest = store._shelf, sample().key.digest
    row = shelf.index.get(digest)
    assert row is not None
    assert shelf.disk is not None
    size, header = row.file_bytes, await shelf.disk.read_header(digest)
    shelf._unlist_row(digest)
    row.file_bytes = 1
    shelf.enlist(digest, row)
    shelf.correct(digest, row, header)
    assert (shelf.index.file_bytes, shelf.space._all.free_bytes) == (size, size)
    assert shelf.index.get(digest) is row
