from __future__ import annotations

from kvblend.store.index import ChunkIndex, IndexRow


def test_rows_are_found_and_counted() -> None:
    index = ChunkIndex({b"a": IndexRow(3, 100)})
    index.add(b"b", IndexRow(4, 50))
    assert (len(index), index.file_bytes, b"b" in index, index.get(b"c")) == (2, 150, True, None)


def test_a_row_replaces_an_older_one() -> None:
    index = ChunkIndex({b"a": IndexRow(3, 100)})
    index.add(b"a", IndexRow(3, 70))
    assert (len(index), index.file_bytes) == (1, 70)


def test_removing_tells_whether_it_was_there() -> None:
    index = ChunkIndex({b"a": IndexRow(3, 100)})
    assert [index.remove(b"a"), index.remove(b"a")] == [True, False]
    assert index.file_bytes == 0
