"""Who owns a store folder: the marker file that says it is one, and the lock that keeps a second process out.

Everything here blocks; the disk tier runs it off the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from kvblend.store.errors import StoreUnusable
from kvblend.store.files import FILE_MODE, FOLDER_MODE, sync_folder, write_whole

MARKER_NAME = "kvblend-store.json"
LOCK_NAME = "kvblend-store.lock"
MARKER_FORMAT = "kvblend-store"
MARKER_BYTES_MAX = 65536
STORE_VERSION = 1
"""Of the folder. Chunk files have versions of their own."""

_MARKER_TEMP_NAME = MARKER_NAME + ".tmp"


def claim_root(root: Path) -> int:
    """Make `root` a store folder if it is new or empty, and lock it; the lock's file descriptor.

    Raises StoreUnusable, leaving the folder as it was, when it is no folder, not writable, not empty without being a
    store, a store of another format version, or in use by another process.
    """
    try:
        _make_root(root)
        is_store = check_marker(root)
        if not os.access(root, os.W_OK | os.X_OK):
            raise StoreUnusable(root, "it is not writable")
        lock = _take_lock(root)
    except OSError as error:
        raise StoreUnusable(root, _explain(error)) from error
    try:
        if not is_store and not check_marker(root):
            _write_marker(root)
    except OSError as error:
        os.close(lock)
        raise StoreUnusable(root, _explain(error)) from error
    except StoreUnusable:
        os.close(lock)
        raise
    return lock


def release_root(lock: int) -> None:
    """Give the folder back: closes the descriptor of `claim_root`, which drops its lock."""
    os.close(lock)


def _explain(error: OSError) -> str:
    return f"{(error.strerror or str(error)).lower()}" + (f" ({error.filename})" if error.filename else "")


def _make_root(root: Path) -> None:
    """Make the folder and its missing parents, each made durable in its own parent."""
    if root.is_dir():
        return
    if root.exists() or root.is_symlink():
        raise StoreUnusable(root, "it is not a folder")
    if root.parent != root:
        _make_root(root.parent)
    root.mkdir(FOLDER_MODE, exist_ok=True)
    sync_folder(root.parent)


def check_marker(root: Path) -> bool:
    """True for a store of this version, False for a folder that may become one; StoreUnusable for any other."""
    marker = root / MARKER_NAME
    if not marker.is_file():
        # a process that died between lock and marker leaves these two names
        others = sorted(set(os.listdir(root)) - {LOCK_NAME, _MARKER_TEMP_NAME})
        if others:
            raise StoreUnusable(root, f"it is neither empty nor a kvblend store ({MARKER_NAME} is missing)")
        return False
    with marker.open("rb") as file:
        raw = file.read(MARKER_BYTES_MAX)
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.get("format") != MARKER_FORMAT:
        raise StoreUnusable(root, f"its {MARKER_NAME} is not that of a kvblend store")
    version = fields.get("version")
    if type(version) is not int or version != STORE_VERSION:
        raise StoreUnusable(root, f"its format version is {version!r}; this program uses {STORE_VERSION}")
    return True


def _take_lock(root: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(root / LOCK_NAME, flags, FILE_MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _read_owner(lock)
        os.close(lock)
        raise StoreUnusable(root, f"it is in use by another process{owner}") from None
    except OSError:
        os.close(lock)
        raise
    # only for the message above; a full disk does not matter here
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    return lock


def _read_owner(lock: int) -> str:
    """Who holds the lock, as far as its file says."""
    with contextlib.suppress(OSError):
        text = os.pread(lock, 32, 0).strip()
        if text.isdigit():
            return f" (pid {int(text)})"
    return ""


def _write_marker(root: Path) -> None:
    temp = root / _MARKER_TEMP_NAME
    text = json.dumps({"format": MARKER_FORMAT, "version": STORE_VERSION}) + "\n"
    write_whole(temp, [text.encode()])
    os.replace(temp, root / MARKER_NAME)
    sync_folder(root)
