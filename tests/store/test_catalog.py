from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvblend.store.catalog import CATALOG_NAME, Catalog, Layout, Remembered
from kvblend.store.catalog_rows import pack_row
from kvblend.store.format import KVShape
from kvblend.store.index import IndexRow

LAYOUT = Layout("model-a", KVShape(4, 2, 4, "float32"))
OTHER = Layout("model-b", KVShape(4, 2, 4, "float32"))


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def full(row: IndexRow) -> tuple[object, ...]:
    return (row.num_tokens, row.file_bytes, row.tenant, row.cost_s, row.hits, row.created_s, row.used_s)


async def remembered(root: Path, layout: Layout = LAYOUT) -> Remembered:
    catalog, found = await Catalog.open(root / CATALOG_NAME, layout)
    await catalog.close()
    return found


async def filled(root: Path, *numbers: int) -> None:
    catalog, _ = await Catalog.open(root / CATALOG_NAME, LAYOUT)
    for number in numbers:
        catalog.add(digest(number), IndexRow(number, 4096 * number))
    await catalog.close()


async def test_everything_about_a_chunk_is_remembered(tmp_path: Path) -> None:
    row = IndexRow(5, 8192, "abcdef012345", 0.25, 7, 100.5, 200.5)
    catalog, _ = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    catalog.add(digest(1), row)
    await catalog.close()
    found = await remembered(tmp_path)
    assert {name: full(one) for name, one in found.rows.items()} == {digest(1): full(row)}


async def test_a_new_catalog_says_that_it_was_made(tmp_path: Path) -> None:
    assert [(await remembered(tmp_path)).was_made for _ in range(2)] == [False, True]


async def test_what_was_removed_is_forgotten(tmp_path: Path) -> None:
    await filled(tmp_path, 1, 2)
    catalog, _ = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    catalog.remove(digest(1))
    catalog.add(digest(3), IndexRow(3, 3))
    catalog.remove(digest(3))
    await catalog.close()
    assert set((await remembered(tmp_path)).rows) == {digest(2)}


async def test_other_layouts_are_told_apart(tmp_path: Path) -> None:
    catalog, _ = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    catalog.add(digest(1), IndexRow(1, 4096))
    catalog.add(digest(2), IndexRow(2, 4096), OTHER)
    await catalog.close()
    mine, others = await remembered(tmp_path), await remembered(tmp_path, OTHER)
    assert (set(mine.rows), mine.foreign) == ({digest(1)}, {digest(2)})
    assert (set(others.rows), others.foreign) == ({digest(2)}, {digest(1)})


@pytest.mark.parametrize("name", [field.name for field in fields(KVShape)])
async def test_layouts_that_differ_in_one_field_are_told_apart(tmp_path: Path, name: str) -> None:
    change: dict[str, Any] = {name: "bfloat16" if name == "dtype" else 9}
    await filled(tmp_path, 1)
    found = await remembered(tmp_path, Layout("model-a", replace(LAYOUT.shape, **change)))
    assert (found.rows, found.foreign) == ({}, {digest(1)})


async def test_uses_are_remembered_as_they_are_at_the_end(tmp_path: Path) -> None:
    await filled(tmp_path, 1)
    catalog, found = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    row = found.rows[digest(1)]
    for hits in (1, 2, 3):
        row.hits, row.used_s = hits, 10.0 * hits
        catalog.use(digest(1), row)
    await catalog.close()
    again = (await remembered(tmp_path)).rows[digest(1)]
    assert (again.hits, again.used_s) == (3, 30.0)


async def test_a_use_does_not_bring_a_removed_chunk_back(tmp_path: Path) -> None:
    await filled(tmp_path, 1)
    catalog, found = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    catalog.remove(digest(1))
    catalog.use(digest(1), found.rows[digest(1)])
    await catalog.close()
    assert (await remembered(tmp_path)).rows == {}


def copy_catalog(root: Path) -> Path:
    """What a crash of this moment would leave."""
    (root / "copy").mkdir()
    for path in root.glob(f"{CATALOG_NAME}*"):
        (root / "copy" / path.name).write_bytes(path.read_bytes())
    return root / "copy"


async def test_changes_are_committed_without_a_close(tmp_path: Path) -> None:
    catalog, _ = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    catalog.add(digest(1), IndexRow(1, 4096))
    assert catalog._flusher is not None
    await catalog._flusher
    copy = await asyncio.to_thread(copy_catalog, tmp_path)
    assert set((await remembered(copy)).rows) == {digest(1)}
    await catalog.close()


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(8192))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def run_sql(*statements: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return run


def set_row(change: str) -> Callable[[Path], None]:
    return run_sql(f"UPDATE chunks SET {change}")


def set_field(**change: Any) -> Callable[[Path], None]:
    row = pack_row(digest(1), IndexRow(**{"num_tokens": 1, "file_bytes": 4096, **change}))
    return run_sql(f"UPDATE chunks SET row = x'{row.hex()}'")


HARMS = [
    *map(set_row, ("row = 'text'", "row = 7", "row = x'00'", "row = row || x'00'", "row = zeroblob(96)")),
    *(set_field(cost_s=value) for value in (-1.0, math.inf, math.nan)),
    *(set_field(**{name: math.nan}) for name in ("created_s", "used_s")),
    set_field(num_tokens=0),
    set_field(file_bytes=0),
    set_field(file_bytes=1 << 40),
    set_field(tenant="\xe9"),
    garbage,
    cut,
    empty,
    run_sql("PRAGMA user_version=0"),
    run_sql("PRAGMA user_version=1"),
    run_sql("DROP TABLE layouts"),
    run_sql("CREATE TABLE more(x)"),
    run_sql("CREATE TRIGGER t AFTER DELETE ON chunks BEGIN DELETE FROM layouts; END"),
]


@pytest.mark.parametrize("harm", HARMS)
async def test_a_catalog_that_cannot_be_used_is_made_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    await filled(tmp_path, 1)
    harm(tmp_path / CATALOG_NAME)
    found = await remembered(tmp_path)
    assert (found.rows, found.foreign) == ({}, set())
    assert "built anew" in caplog.text
    await filled(tmp_path, 2)
    assert set((await remembered(tmp_path)).rows) == {digest(2)}


async def test_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / CATALOG_NAME).symlink_to(outside)
    await filled(tmp_path / "root", 1)
    assert outside.read_bytes() == b"mine"
    assert set((await remembered(tmp_path / "root")).rows) == {digest(1)}


async def test_without_a_place_for_it_the_store_goes_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / CATALOG_NAME).mkdir()
    await filled(tmp_path, 1)
    assert (await remembered(tmp_path)).rows == {}
    assert "cannot be made" in caplog.text


async def test_an_error_while_writing_ends_its_work_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    catalog, _ = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    monkeypatch.setattr(catalog, "_write", fail)
    for number in (1, 2):
        catalog.add(digest(number), IndexRow(1, 4096))
        await asyncio.sleep(0)
        if catalog._flusher is not None:
            await catalog._flusher
    await catalog.close()
    assert caplog.text.count("is full") == 1
    assert (await remembered(tmp_path)).rows == {}


async def test_a_failed_commit_leaves_the_older_state(tmp_path: Path) -> None:
    await filled(tmp_path, 1)
    catalog, _ = await Catalog.open(tmp_path / CATALOG_NAME, LAYOUT)
    catalog.remove(digest(1))
    catalog.add(digest(2), IndexRow(1, 1 << 70))
    with pytest.raises(struct.error):
        await catalog._run(lambda: catalog._write(dict(catalog._changes), {}))
    catalog._changes.clear()
    await catalog.close()
    assert set((await remembered(tmp_path)).rows) == {digest(1)}


async def test_a_cancelled_opening_leaves_nothing_open(tmp_path: Path) -> None:
    opening = asyncio.create_task(Catalog.open(tmp_path / CATALOG_NAME, LAYOUT))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await filled(tmp_path, 1)
    assert set((await remembered(tmp_path)).rows) == {digest(1)}
