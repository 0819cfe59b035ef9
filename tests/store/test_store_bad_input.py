"""What a store is given and cannot use: a clear error before any work, and nothing outside its folder is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvblend.store.errors import StoreUnusable, StoreWriteFailed
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore, KVShape

if TYPE_CHECKING:
    from tests.store.conftest import FaultyIO, Flip, Make, OpenStore

BUDGET = 1 << 20
BAD_IDS = ("..", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", "", "A" * 64, "é" * 64, "0" * 63 + "/")


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("value", [0, -1, -(1 << 40)])
@pytest.mark.parametrize("name", ["host_bytes_budget", "disk_bytes_budget", "tenant_bytes_max"])
async def test_a_budget_below_one_byte_is_refused(tmp_path: Path, shape: KVShape, name: str, value: int) -> None:
    limits: dict[str, Any] = {"host_bytes_budget": BUDGET, name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be at least 1"):
        await ChunkStore.open(tmp_path / "kv", shape, "model-a", **limits)
    assert everything(tmp_path) == set()


async def test_a_host_budget_beyond_the_machines_memory_is_refused(tmp_path: Path, shape: KVShape) -> None:
    with pytest.raises(ValueError, match=rf"host_bytes_budget is {1 << 60}; this machine has \d+ bytes of memory"):
        await ChunkStore.open(tmp_path / "kv", shape, "model-a", 1 << 60)
    assert everything(tmp_path) == set()


async def test_a_disk_budget_beyond_the_disk_is_refused(tmp_path: Path, shape: KVShape) -> None:
    with pytest.raises(StoreUnusable, match=f"disk_bytes_budget is {1 << 62}; the file system there has"):
        await ChunkStore.open(tmp_path / "kv", shape, "model-a", BUDGET, disk_bytes_budget=1 << 62)


@pytest.mark.parametrize("name", ["host_policy", "disk_policy"])
async def test_an_unknown_policy_is_refused(tmp_path: Path, shape: KVShape, name: str) -> None:
    policy: dict[str, Any] = {name: "fifo"}
    with pytest.raises(ValueError, match=f"{name} is 'fifo'; choose lru, cost"):
        await ChunkStore.open(tmp_path / "kv", shape, "model-a", BUDGET, **policy)
    assert everything(tmp_path) == set()


async def test_a_chunk_larger_than_the_disk_budget_is_refused_at_once(
    tmp_path: Path, shape: KVShape, sample: Make
) -> None:
    one = sample()
    async with await ChunkStore.open(tmp_path, shape, "model-a", BUDGET, disk_bytes_budget=5000) as store:
        with pytest.raises(StoreWriteFailed, match=r"takes \d+ bytes; disk_bytes_budget is 5000"):
            await store.put(one.key, one.ids, one.layers)
    assert not [name for name in everything(tmp_path) if name.endswith(".kvc")]


async def test_a_path_that_is_a_file_is_refused_and_stays(tmp_path: Path, open_store: OpenStore) -> None:
    (tmp_path / "kv").write_text("mine")
    for path in (tmp_path / "kv", tmp_path / "kv" / "below"):
        with pytest.raises(StoreUnusable, match=r"not a folder|not a directory"):
            await open_store(path)
    assert (tmp_path / "kv").read_text() == "mine"


async def test_a_chunks_folder_that_is_a_file_is_refused(tmp_path: Path, open_store: OpenStore) -> None:
    await (await open_store(tmp_path)).close()
    (tmp_path / "chunks").rmdir()
    (tmp_path / "chunks").write_text("mine")
    with pytest.raises(StoreUnusable, match="chunks"):
        await open_store(tmp_path)
    assert (tmp_path / "chunks").read_text() == "mine"


async def test_a_read_only_folder_is_refused(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await open_store(tmp_path)).close()
    # whoever runs the tests as root may write everywhere
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: not mode & os.W_OK and real(path, mode, **more))
    with pytest.raises(StoreUnusable, match="it is not writable"):
        await open_store(tmp_path)


async def test_a_disk_that_turned_read_only_serves_what_it_has(
    tmp_path: Path, open_store: OpenStore, sample: Make, io: FaultyIO
) -> None:
    store, one, two = await open_store(tmp_path, io), sample(1), sample(2)
    await store.put(one.key, one.ids, one.layers)
    store.evict_nowait(one.key.id)
    for step in ("make_folder", "write_file"):
        io.fail(step, OSError(30, "Read-only file system"))
    with pytest.raises(StoreWriteFailed, match="Read-only file system"):
        await store.put(two.key, two.ids, two.layers)
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    with lease:
        assert bytes(await lease.layer(0)) == one.layers[0]


def renamed(path: Path) -> None:
    """Another id's name: a whole chunk file under it."""
    other = path.parents[1] / "00" / ("0" * 64 + ".kvc")
    other.parent.mkdir(exist_ok=True)
    shutil.copy(path, other)


def in_another_folder(path: Path) -> None:
    other = path.parents[1] / ("00" if path.parent.name != "00" else "01") / path.name
    other.parent.mkdir(exist_ok=True)
    shutil.copy(path, other)


def by_hand(path: Path) -> None:
    (path.parent / "my chunk.kvc").write_bytes(path.read_bytes())
    (path.parent / "..kvc").write_bytes(b"x")
    (path.parents[1] / "readme.txt").write_text("mine")


@pytest.mark.parametrize("harm", [renamed, in_another_folder, by_hand])
async def test_chunk_files_named_by_hand_are_not_served(
    tmp_path: Path, open_store: OpenStore, sample: Make, harm: Callable[[Path], None]
) -> None:
    one = sample()
    store = await open_store(tmp_path)
    await store.put(one.key, one.ids, one.layers)
    await store.close()
    harm(one.path(tmp_path))
    before = everything(tmp_path / "chunks")
    store = await open_store(tmp_path)
    assert store.stats().chunks == 1
    assert await store.token_ids("0" * 64) is None
    await store.close()
    assert everything(tmp_path / "chunks") == before


@pytest.mark.parametrize("chunk_id", BAD_IDS)
async def test_an_id_that_is_none_names_no_path(
    tmp_path: Path, open_store: OpenStore, sample: Make, chunk_id: str
) -> None:
    one = sample()
    store = await open_store(tmp_path / "kv")
    await store.put(one.key, one.ids, one.layers)
    (tmp_path / "outside.kvc").write_text("mine")
    before = everything(tmp_path)
    assert await store.token_ids(chunk_id) is None
    assert await store.delete(chunk_id) is False
    assert store.evict_nowait(chunk_id) is False
    assert everything(tmp_path) == before


@pytest.mark.parametrize("text", ["../../etc", "/etc/passwd", "a/b", "..", "a\0b", "x" * 60000])
async def test_separators_in_a_salt_or_fingerprint_name_no_path(tmp_path: Path, shape: KVShape, text: str) -> None:
    ids = (1, 2, 3)
    key = ChunkKey.of(text, text, (), ids)
    layers = [bytearray(shape.layer_bytes(3)) for _ in range(shape.num_layers)]
    async with await ChunkStore.open(tmp_path / "kv", shape, text, BUDGET) as store:
        assert await store.put(key, ids, layers)
    files = {name for name in everything(tmp_path) if name.endswith(".kvc")}
    assert files == {f"kv/chunks/{key.id[:2]}/{key.id}.kvc"}
    async with await ChunkStore.open(tmp_path / "kv", shape, text, BUDGET) as store:
        assert store.contains(key)


async def test_a_linked_chunk_file_is_not_followed(tmp_path: Path, open_store: OpenStore, sample: Make) -> None:
    one = sample()
    store = await open_store(tmp_path / "kv")
    await store.put(one.key, one.ids, one.layers)
    await store.close()
    path = one.path(tmp_path / "kv")
    outside = path.rename(tmp_path / "outside.kvc")
    path.symlink_to(outside)
    store = await open_store(tmp_path / "kv")
    assert await store.lease(one.key, one.ids) is None
    await store.delete(one.key.id)
    assert outside.exists()


async def test_nothing_is_written_or_swept_through_a_linked_folder(
    tmp_path: Path, open_store: OpenStore, sample: Make
) -> None:
    one, root, outside = sample(), tmp_path / "kv", tmp_path / "outside"
    outside.mkdir()
    (outside / f"{one.key.id}.tmp").write_text("mine")
    await (await open_store(root)).close()
    one.path(root).parent.symlink_to(outside)
    store = await open_store(root)
    with pytest.raises(StoreWriteFailed, match="a link, which could lead out of the store"):
        await store.put(one.key, one.ids, one.layers)
    assert everything(outside) == {f"{one.key.id}.tmp"}


async def test_a_damaged_file_is_not_moved_through_a_link(
    tmp_path: Path, open_store: OpenStore, sample: Make, flip_byte: Flip
) -> None:
    one, root, outside = sample(), tmp_path / "kv", tmp_path / "outside"
    outside.mkdir()
    store = await open_store(root)
    await store.put(one.key, one.ids, one.layers)
    store.evict_nowait(one.key.id)
    (root / "damaged").symlink_to(outside)
    flip_byte(one.path(root), 100)
    assert await store.lease(one.key, one.ids) is None
    await store.close()
    assert (everything(outside), one.path(root).exists()) == (set(), False)


async def test_a_linked_chunks_folder_is_refused(tmp_path: Path, open_store: OpenStore) -> None:
    await (await open_store(tmp_path / "kv")).close()
    (tmp_path / "kv" / "chunks").rename(tmp_path / "outside")
    (tmp_path / "kv" / "chunks").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreUnusable, match="a link, which could lead out of the store"):
        await open_store(tmp_path / "kv")


async def test_another_models_chunks_stay_untouched(tmp_path: Path, open_store: OpenStore, sample: Make) -> None:
    one = sample()
    store = await open_store(tmp_path)
    await store.put(one.key, one.ids, one.layers)
    await store.close()
    raw = one.path(tmp_path).read_bytes()
    store = await open_store(tmp_path, fingerprint="model-b")
    assert (store.stats().chunks, store.stats().foreign) == (0, 1)
    assert not store.contains(one.key)
    assert await store.delete(one.key.id) is False
    await store.close()
    assert one.path(tmp_path).read_bytes() == raw
