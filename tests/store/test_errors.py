from __future__ import annotations

from pathlib import Path

import pytest

from kvblend.store.errors import ChunkDamaged, ForeignFile, StoreError, StoreUnusable, StoreWriteFailed


def test_an_unusable_folder_names_path_and_reason() -> None:
    error = StoreUnusable(Path("some/where"), "it is not a folder")
    assert str(error) == "store folder some/where: it is not a folder"


@pytest.mark.parametrize("error", [ChunkDamaged("why"), ForeignFile("why")])
def test_chunk_errors_keep_their_reason(error: ChunkDamaged | ForeignFile) -> None:
    assert error.reason == str(error) == "why"


def test_all_are_store_errors() -> None:
    assert all(issubclass(kind, StoreError) for kind in (StoreUnusable, StoreWriteFailed, ChunkDamaged, ForeignFile))
