"""Notes beside the chunks: written whole, read with suspicion, and no hindrance to the store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvblend.store.format import KVShape
from kvblend.store.notes import NOTE_BYTES_MAX, note_path, read_note, write_note
from kvblend.store.store import ChunkStore


def test_a_note_is_read_as_it_was_written_last(tmp_path: Path) -> None:
    assert read_note(tmp_path, "gate") == {}
    write_note(tmp_path, "gate", {"a": [1, None]})
    write_note(tmp_path, "gate", {"b": "x"})
    assert read_note(tmp_path, "gate") == {"b": "x"}
    assert os.listdir(tmp_path) == ["kvblend-gate.json"]


@pytest.mark.parametrize(
    "text", [b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"a": "' + b"x" * NOTE_BYTES_MAX + b'"}', b""]
)
def test_a_damaged_note_counts_as_none(tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    note_path(tmp_path, "gate").write_bytes(text)
    assert read_note(tmp_path, "gate") == {}
    assert "ignored" in caplog.text


def test_a_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "other").write_text('{"a": 1}')
    note_path(tmp_path, "gate").symlink_to(tmp_path / "other")
    assert read_note(tmp_path, "gate") == {}
    assert "ignored" in caplog.text


@pytest.mark.parametrize("name", ["", "../x", "Gate", "a.b"])
def test_a_name_is_letters_and_hyphens(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="lower-case letters"):
        note_path(tmp_path, name)


def test_numbers_that_json_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_note(tmp_path, "gate", {"a": float("nan")})


async def test_a_store_opens_again_beside_a_note(tmp_path: Path) -> None:
    shape = KVShape(1, 1, 2, "float32")
    root = tmp_path / "store"
    async with await ChunkStore.open(root, shape, "m" * 64, 1 << 20):
        pass
    await asyncio.to_thread(write_note, root, "gate", {})
    async with await ChunkStore.open(root, shape, "m" * 64, 1 << 20) as store:
        assert store.stats().foreign == 0
