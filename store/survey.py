"""What lies in a store folder, of whatever model: read from the files alone. Everything here blocks and only reads."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blake3 import blake3

from kvblend.store.aside import NOTHING, Aside, count_aside
from kvblend.store.disk import CHUNK_SUFFIX, CHUNKS_NAME, DAMAGED_NAME, TEMP_SUFFIX
from kvblend.store.errors import ChunkDamaged, ChunkError, ForeignFile, OldFile, StoreError, StoreUnusable
from kvblend.store.files import open_regular, read_head
from kvblend.store.format import ChunkHeader, KVShape, parse_header
from kvblend.store.keys import tag_of, tenant_of
from kvblend.store.root import check_marker

Progress = Callable[[int, int], None]
"""Hears how much of how much is done."""
FileKind = Literal["damaged", "old", "foreign", "temporary", "stray"]
ODD_KINDS: tuple[FileKind, ...] = ("damaged", "old", "foreign", "temporary", "stray")

_BLOCK_BYTES = 1 << 20
_FOLDER_NAME = re.compile(r"[0-9a-f]{2}")
_STEM = re.compile(r"[0-9a-f]{64}")


class BadOrder(StoreError, ValueError):
    """What is asked for cannot be meant: an unknown chunk, a size below zero, a target that is taken."""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One stored chunk: its public id, whose it is (a `tenant_of` value), its length in tokens, its file's bytes and
    when that was written (seconds since the epoch).
    """

    id: str
    fingerprint: str
    tenant: str
    shape: KVShape
    num_tokens: int
    file_bytes: int
    stored_at: float


@dataclass(frozen=True, slots=True)
class OddFile:
    """A file that is no usable chunk. `stray` ones have a name that no store gives, and are nobody's business here.

    `old` ones are chunks of an older format `version` that nobody will ever ask for; of others that is None.
    """

    path: Path
    kind: FileKind
    reason: str
    version: int | None = None


@dataclass(slots=True)
class Survey:
    """Everything under `chunks/` as far as headers tell, and what lies in `damaged/`."""

    chunks: list[ChunkInfo] = field(default_factory=list)
    odd: list[OddFile] = field(default_factory=list)
    aside: Aside = NOTHING

    @property
    def file_bytes(self) -> int:
        """Bytes of all usable chunk files."""
        return sum(chunk.file_bytes for chunk in self.chunks)

    def odd_of(self, kind: FileKind) -> list[OddFile]:
        """The files of one kind."""
        return [file for file in self.odd if file.kind == kind]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which chunks are meant: those that fit every field that is given, so all of them by default.

    `tenant` is a salt or its `tenant_tag`; `stored_before` is in seconds since the epoch.
    """

    ids: frozenset[str] | None = None
    tenant: str | None = None
    fingerprint: str | None = None
    stored_before: float | None = None

    def holds(self, chunk: ChunkInfo) -> bool:
        """Whether the chunk is meant."""
        return (
            (self.ids is None or chunk.id in self.ids)
            and (self.tenant is None or self.tenant == tag_of(chunk.tenant) or _is_salt_of(self.tenant, chunk.tenant))
            and (self.fingerprint is None or self.fingerprint == chunk.fingerprint)
            and (self.stored_before is None or chunk.stored_at < self.stored_before)
        )


def _is_salt_of(text: str, tenant: str) -> bool:
    with contextlib.suppress(ValueError):  # an argument need not be text that UTF-8 can hold
        return tenant_of(text) == tenant
    return False


def require_store(root: Path) -> None:
    """Raises StoreUnusable where `root` is no store of this version; makes nothing."""
    try:
        if not root.exists():
            raise StoreUnusable(root, "it does not exist")
        if not root.is_dir():
            raise StoreUnusable(root, "it is not a folder")
        if not check_marker(root):
            raise StoreUnusable(root, "it is empty: nothing was ever stored there")
    except OSError as error:
        raise StoreUnusable(root, str(error)) from error


def survey(
    root: Path, progress: Progress | None = None, inspect: Callable[[Path], ChunkHeader] | None = None
) -> Survey:
    """Look at every file. `inspect` (None: `read_header`) says what a chunk file is, or why it is none.

    May run while a server uses the folder: what vanishes meanwhile is left out. Raises StoreUnusable.
    """
    require_store(root)
    look = inspect or read_header
    found = Survey()
    paths: list[Path] = []
    try:
        found.aside = count_aside(root / DAMAGED_NAME)
        for path, odd in _walk(root / CHUNKS_NAME):
            if odd is None:
                paths.append(path)
            else:
                found.odd.append(odd)
    except OSError as error:
        raise StoreUnusable(root, str(error)) from error
    # many chunks share one shape: one object for all of them
    shapes: dict[KVShape, KVShape] = {}
    for done, path in enumerate(paths, 1):
        try:
            header, written_at = look(path), path.stat().st_mtime
        except FileNotFoundError:
            continue
        except OldFile as error:
            found.odd.append(OddFile(path, "old", str(error), error.version))
        except ForeignFile as error:
            found.odd.append(OddFile(path, "foreign", str(error)))
        except (ChunkError, OSError) as error:
            found.odd.append(OddFile(path, "damaged", str(error)))
        else:
            key, shape = header.key, shapes.setdefault(header.shape, header.shape)
            row = ChunkInfo(
                key.id, key.fingerprint, key.tenant, shape, header.num_tokens, header.file_bytes, written_at
            )
            found.chunks.append(row)
        if progress is not None:
            progress(done, len(paths))
    return found


def read_header(path: Path) -> ChunkHeader:
    """The header of a chunk file, its name and place checked. Raises OSError, ChunkDamaged or ForeignFile."""
    head = read_head(path)
    header = parse_header(head.first, head.file_bytes)
    if header.key.id != path.stem:
        raise ChunkDamaged("its name is not the id of its content")
    return header


def verify_file(path: Path) -> ChunkHeader:
    """`read_header`, with every layer's checksum compared as well."""
    header = read_header(path)
    descriptor = open_regular(path)
    try:
        for index, span in enumerate(header.layers):
            hasher, at, left = blake3(), header.data_start + span.offset, span.length
            while left and (block := os.pread(descriptor, min(left, _BLOCK_BYTES), at)):
                hasher.update(block)
                at, left = at + len(block), left - len(block)
            if left or hasher.digest() != span.checksum:
                raise ChunkDamaged(f"the checksum of layer {index} does not match")
    finally:
        os.close(descriptor)
    return header


def _walk(folder: Path) -> Iterator[tuple[Path, OddFile | None]]:
    """Paths that may be chunk files, and others with what is odd about them. Links to folders are not followed."""
    for name in _names(folder):
        inner = folder / name
        if not _FOLDER_NAME.fullmatch(name) or not stat.S_ISDIR(inner.lstat().st_mode):
            yield inner, OddFile(inner, "stray", "no store makes a thing of this name here")
            continue
        with os.scandir(inner) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        for file_name, is_folder in found:
            yield _judge(inner / file_name, is_folder)


def _judge(path: Path, is_folder: bool) -> tuple[Path, OddFile | None]:
    if is_folder or not _STEM.fullmatch(path.stem) or path.suffix not in (CHUNK_SUFFIX, TEMP_SUFFIX):
        return path, OddFile(path, "stray", "its name is not that of a chunk file")
    if path.suffix == TEMP_SUFFIX:
        return path, OddFile(path, "temporary", "a write that never ended, or one under way")
    if path.parent.name != path.stem[:2]:
        return path, OddFile(path, "damaged", f"it lies in {path.parent.name}/, where no reader looks for it")
    return path, None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
