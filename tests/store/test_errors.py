from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvblend.store.errors import (
    ChunkDamaged,
    ForeignFile,
    StoreError,
    StoreUnusable,
    StoreWriteFailed,
    is_shortage,
)


def test_an_unusable_folder_names_path_and_reason() -> None:
    error = StoreUnusable(Path("some/where"), "it is not a folder")
    assert str(error) == "store folder some/where: it is not a folder"


@pytest.mark.parametrize("error", [ChunkDamaged("why"), ForeignFile("why")])
def test_chunk_errors_keep_their_reason(error: ChunkDamaged | ForeignFile) -> None:
    assert error.reason == str(error) == "why"


def test_all_are_store_errors() -> None:
    assert all(issubclass(kind, StoreError) for kind in (StoreUnusable, StoreWriteFailed, ChunkDamaged, ForeignFile))


def test_a_shortage_is_told_from_a_bad_file() -> None:
    errors = (OSError(errno.EMFILE, "files"), OSError(errno.ENOMEM, "memory"), OSError(errno.EIO, "disk"), ValueError())
    assert [is_shortage(error) for error in errors] == [True, True, False, False]
