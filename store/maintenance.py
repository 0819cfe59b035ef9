"""Work on a store folder that no server is using: check, repair, evict, clear. Everything here blocks.

The files are the truth: whoever opens the store next brings the durable index in line with the names it finds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvblend.store.aside import trim_aside
from kvblend.store.catalog import CATALOG_NAME
from kvblend.store.disk import CHUNK_SUFFIX, CHUNKS_NAME, DAMAGED_NAME
from kvblend.store.errors import StoreUnusable
from kvblend.store.files import FOLDER_MODE, sync_folder
from kvblend.store.root import claim_root, release_root
from kvblend.store.survey import BadOrder, ChunkInfo, Progress, Selection, Survey, require_store, survey, verify_file

_CATALOG_SUFFIXES = ("", "-wal", "-shm", "-journal")


class Removal(NamedTuple):
    """How many chunks went, how many bytes their files had, and how many of the store's chunks and bytes are left."""

    chunks: int
    file_bytes: int
    chunks_left: int
    bytes_left: int


@contextlib.contextmanager
def claimed(root: Path, *, create: bool = False) -> Iterator[None]:
    """Keep everybody else out of the store; with `create`, a new or empty folder becomes one.

    Raises StoreUnusable, where a server or another command has the store open as well.
    """
    if not create:
        require_store(root)
    lock = claim_root(root)
    try:
        yield
    finally:
        release_root(lock)


def check(root: Path, *, repair: bool = False, remove_old: bool = False, progress: Progress | None = None) -> Survey:
    """Verify every header and every layer of every chunk file; what was found.

    With `repair`, damaged files move to `damaged/`, leftovers of broken writes go, and the durable index is built anew
    by the next opener. With `remove_old`, chunks of an older version that are never read again go. Files of other
    versions and strays stay where they are. Raises StoreUnusable and OSError.
    """
    with claimed(root):
        found = survey(root, progress, verify_file)
        if remove_old:
            _unlink_all(file.path for file in found.odd_of("old"))
        if repair:
            _repair(root, found)
        return found


def evict(
    root: Path, selection: Selection, *, bytes_max: int | None = None, progress: Progress | None = None
) -> Removal:
    """Remove the selected chunks; with `bytes_max`, only the longest stored of them, until the store's chunk files have
    at most so many bytes.

    Raises StoreUnusable, OSError, and BadOrder for a negative `bytes_max` or an id that is not stored.
    """
    if bytes_max is not None and bytes_max < 0:
        raise BadOrder(f"bytes_max is {bytes_max}; it must be at least 0")
    with claimed(root):
        found = survey(root)
        check_ids(found.chunks, selection)
        going = sorted(filter(selection.holds, found.chunks), key=lambda chunk: chunk.stored_at)
        if bytes_max is not None:
            going = list(_until(going, found.file_bytes - bytes_max))
        _remove_chunks(root, going, progress)
        gone = sum(chunk.file_bytes for chunk in going)
        return Removal(len(going), gone, len(found.chunks) - len(going), found.file_bytes - gone)


def clear(root: Path, *, progress: Progress | None = None) -> Removal:
    """Remove every chunk, old ones included, leftovers of broken writes, and what was set aside as damaged; the folder
    stays a store.

    Files of other versions and strays stay. Raises StoreUnusable and OSError.
    """
    with claimed(root):
        found = survey(root)
        _remove_chunks(root, found.chunks, progress)
        _unlink_all(file.path for file in (*found.odd_of("temporary"), *found.odd_of("damaged"), *found.odd_of("old")))
        aside = own_folder(root, DAMAGED_NAME)
        _unlink_all(aside / name for name in sorted(os.listdir(aside)) if name.endswith(CHUNK_SUFFIX))
        return Removal(len(found.chunks), found.file_bytes, 0, 0)


def chunk_path(root: Path, chunk_id: str) -> Path:
    """Where the file of a chunk lies."""
    return root / CHUNKS_NAME / chunk_id[:2] / (chunk_id + CHUNK_SUFFIX)


def own_folder(root: Path, *names: str) -> Path:
    """A folder below the root, made durably where it is missing. StoreUnusable for a link: it could lead out."""
    folder = root
    for name in names:
        folder = folder / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise StoreUnusable(root, f"{folder.relative_to(root)} is not a folder of its own")
        if not folder.exists():
            folder.mkdir(FOLDER_MODE)
            sync_folder(folder.parent)
    return folder


def forget_catalog(root: Path) -> None:
    """Remove the durable index, durably: the next opener builds it from the files."""
    found = [root / (CATALOG_NAME + suffix) for suffix in _CATALOG_SUFFIXES]
    if any(path.exists() for path in found):
        _unlink_all(found)
        sync_folder(root)


def _repair(root: Path, found: Survey) -> None:
    forget_catalog(root)
    _unlink_all(file.path for file in found.odd_of("temporary"))
    if damaged := found.odd_of("damaged"):
        aside = own_folder(root, DAMAGED_NAME)
        for file in damaged:
            os.replace(file.path, aside / file.path.name)
        trim_aside(aside)
        for folder in {aside, *(file.path.parent for file in damaged)}:
            sync_folder(folder)


def check_ids(chunks: Iterable[ChunkInfo], selection: Selection) -> None:
    """Raises BadOrder where an id is selected that no chunk has."""
    if selection.ids is not None and (missing := selection.ids - {chunk.id for chunk in chunks}):
        raise BadOrder(f"id {min(missing)!r} is not that of a stored chunk")


def _until(chunks: Iterable[ChunkInfo], bytes_wanted: int) -> Iterator[ChunkInfo]:
    """Chunks from the first on until their files add up to `bytes_wanted`."""
    for chunk in chunks:
        if bytes_wanted <= 0:
            return
        bytes_wanted -= chunk.file_bytes
        yield chunk


def _remove_chunks(root: Path, chunks: list[ChunkInfo], progress: Progress | None) -> None:
    folders: set[Path] = set()
    for done, chunk in enumerate(chunks, 1):
        path = chunk_path(root, chunk.id)
        path.unlink(missing_ok=True)
        folders.add(path.parent)
        if progress is not None:
            progress(done, len(chunks))
    for folder in folders:
        sync_folder(folder)


def _unlink_all(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
