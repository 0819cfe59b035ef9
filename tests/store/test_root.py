from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvblend.store.errors import StoreUnusable
from kvblend.store.root import LOCK_NAME, MARKER_NAME, claim_root, release_root


def listing(root: Path) -> list[tuple[str, bytes]]:
    return sorted((str(path), path.read_bytes()) for path in root.rglob("*") if path.is_file())


def test_a_new_folder_gets_its_parents_and_a_marker(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    release_root(claim_root(root))
    assert json.loads((root / MARKER_NAME).read_text()) == {"format": "kvblend-store", "version": 1}


def test_an_empty_folder_becomes_a_store(tmp_path: Path) -> None:
    release_root(claim_root(tmp_path))
    assert (tmp_path / MARKER_NAME).exists()


def test_new_parents_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    release_root(claim_root(tmp_path / "a" / "b"))
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")} <= set(synced)


def test_a_store_can_be_claimed_again(tmp_path: Path) -> None:
    release_root(claim_root(tmp_path))
    release_root(claim_root(tmp_path))


def test_what_a_crash_before_the_marker_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    (tmp_path / (MARKER_NAME + ".tmp")).write_text("{")
    release_root(claim_root(tmp_path))
    assert json.loads((tmp_path / MARKER_NAME).read_text())["version"] == 1


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StoreUnusable, match=r"file: it is not a folder"):
        claim_root(path)
    assert path.read_text() == "mine"


def test_a_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreUnusable, match=r"file: it is not a folder"):
        claim_root(tmp_path / "file" / "store")


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreUnusable, match="not a folder"):
        claim_root(tmp_path / "link")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(StoreUnusable, match="neither empty nor a kvblend store"):
        claim_root(tmp_path)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_format_version_is_left_alone(tmp_path: Path, version: object) -> None:
    (tmp_path / MARKER_NAME).write_text(json.dumps({"format": "kvblend-store", "version": version}))
    before = listing(tmp_path)
    with pytest.raises(StoreUnusable, match=f"format version is {version!r}; this program uses 1"):
        claim_root(tmp_path)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other", "version": 1}', "[" * 60000])
def test_another_marker_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER_NAME).write_text(text)
    with pytest.raises(StoreUnusable, match="not that of a kvblend store"):
        claim_root(tmp_path)
    assert listing(tmp_path) == [(str(tmp_path / MARKER_NAME), text.encode())]


def test_a_second_opener_is_refused(tmp_path: Path) -> None:
    lock = claim_root(tmp_path)
    with pytest.raises(StoreUnusable, match="in use by another process"):
        claim_root(tmp_path)
    release_root(lock)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, kvblend.store.root as r, kvblend.store.errors as e\n"
        "try: r.claim_root(pathlib.Path(sys.argv[1]))\n"
        "except e.StoreUnusable as error: print(error.reason)"
    )
    lock = claim_root(tmp_path)
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    release_root(lock)
    assert ran.stdout == f"it is in use by another process (pid {os.getpid()})\n"


@pytest.mark.parametrize("text", ["", "me", "1 2", "-5"])
def test_a_lock_that_names_nobody_is_a_lock_all_the_same(tmp_path: Path, text: str) -> None:
    lock = claim_root(tmp_path)
    (tmp_path / LOCK_NAME).write_text(text)
    with pytest.raises(StoreUnusable, match=r"in use by another process$"):
        claim_root(tmp_path)
    release_root(lock)


def test_a_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # asked of the system rather than set by chmod, which does not bind a privileged user
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreUnusable, match="it is not writable"):
        claim_root(tmp_path)
    assert listing(tmp_path) == []


def test_an_error_of_the_system_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnusable, match=rf"permission denied \(.*{LOCK_NAME}\)"):
        claim_root(tmp_path)


def test_a_failed_marker_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(StoreUnusable, match="no space left"):
            claim_root(tmp_path)
    release_root(claim_root(tmp_path))
