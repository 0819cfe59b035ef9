"""What lies in a store's folder when it is opened: names are listed, only what the catalog does not know is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvblend.store.catalog import Catalog, Layout, Remembered
from kvblend.store.errors import ChunkError, ForeignFile
from kvblend.store.files import DiskIO, FileHead
from kvblend.store.format import ChunkHeader
from kvblend.store.index import IndexRow
from kvblend.store.keys import DIGEST_BYTES

log = logging.getLogger("kvblend.store")

CHUNK_SUFFIX = ".kvc"
TEMP_SUFFIX = ".tmp"
SCAN_FILES_MAX = 64
"""How many files one job of the scan opens."""
LIST_FOLDERS_MAX = 32
"""How many folders one job of the scan lists."""
SLOW_FILES = 256
"""From so many files on, a start without an index is slow enough to warn of."""

ID_CHARS = 2 * DIGEST_BYTES
_is_folder_name = re.compile("[0-9a-f]{2}").fullmatch
_is_temp_name = re.compile(rf"[0-9a-f]{{{ID_CHARS}}}\.tmp").fullmatch
_is_chunk_name = re.compile(rf"[0-9a-f]{{{ID_CHARS}}}\.kvc").fullmatch

ReadHeader = Callable[[Path, FileHead], ChunkHeader]


@dataclass(slots=True)
class ScanReport:
    """What lies in the folder: usable chunks by digest, and how many files were skipped for which reason.

    `headers_read` counts the files that had to be opened for it.
    """

    rows: dict[bytes, IndexRow] = field(default_factory=dict)
    damaged: int = 0
    foreign: int = 0
    headers_read: int = field(default=0, compare=False)


class _Found(NamedTuple):
    """One file that was opened: its header, or why it has none of use."""

    path: Path
    header: ChunkHeader | None
    error: Exception | None


class FolderScan:
    """One walk over `chunks/`, in the light of what the catalog remembers; the catalog hears what has changed."""

    def __init__(
        self, folder: Path, layout: Layout, io: DiskIO, read_header: ReadHeader, catalog: Catalog, known: Remembered
    ) -> None:
        """`read_header` raises ForeignFile and ChunkDamaged, but accepts another model's or shape's header."""
        self._folder = folder
        self._layout = layout
        self._io = io
        self._read_header = read_header
        self._catalog = catalog
        self._known = known
        self._now_s = time.time()
        self._here: list[list[bytes]] = []
        self._unknown: list[Path] = []
        self.report = ScanReport(known.rows)

    async def run(self) -> ScanReport:
        """Walk. Raises OSError when the folder itself cannot be listed."""
        names = [name for name in await self._io.list_folder(self._folder) if _is_folder_name(name)]
        folders = [self._folder / name for name in names]
        batches = [folders[at : at + LIST_FOLDERS_MAX] for at in range(0, len(folders), LIST_FOLDERS_MAX)]
        async with asyncio.TaskGroup() as group:
            for batch in batches:
                group.create_task(self._list(batch))
        self._forget_vanished()
        if self._unknown and not self._known.was_made:
            level = logging.WARNING if len(self._unknown) >= SLOW_FILES else logging.INFO
            log.log(level, "store %s has no index: %d chunk files are read", self._folder.parent, len(self._unknown))
        heads = [self._unknown[at : at + SCAN_FILES_MAX] for at in range(0, len(self._unknown), SCAN_FILES_MAX)]
        # a few at a time: a job is long, and 100,000 names in tasks would be memory for nothing
        for at in range(0, len(heads), 16):
            await asyncio.gather(*(self._read(batch) for batch in heads[at : at + 16]))
        return self.report

    async def _list(self, folders: list[Path]) -> None:
        for folder, names in zip(folders, await self._io.list_folders(folders), strict=True):
            if isinstance(names, OSError):
                log.warning("store folder %s cannot be read and is skipped: %s", folder, names)
                continue
            # all names of a folder at once, for there may be a hundred thousand in all
            digests = digests_of(names, folder.name)
            if digests is None:
                digests = []
                for name in sorted(names):
                    found = digests_of([name], folder.name)
                    if found is not None:
                        digests += found
                    elif _is_temp_name(name):
                        with contextlib.suppress(OSError):
                            await self._io.remove(folder / name)
                    elif _is_chunk_name(name):
                        self._unknown.append(folder / name)  # it lies where it does not belong
            rows, foreign = self._known.rows, self._known.foreign
            new = [one for one in digests if one not in rows and one not in foreign]
            self._here.append(list(set(digests).difference(new)) if new else digests)
            self._unknown += [folder / (one.hex() + CHUNK_SUFFIX) for one in sorted(new)]

    def _forget_vanished(self) -> None:
        rows, foreign = self._known.rows, self._known.foreign
        if sum(map(len, self._here)) < len(rows) + len(foreign):
            for digest in {*rows, *foreign}.difference(*self._here):
                rows.pop(digest, None)
                foreign.discard(digest)
                self._catalog.remove(digest)
        self._here.clear()
        self.report.foreign += len(foreign)

    async def _read(self, paths: list[Path]) -> None:
        heads = await self._io.read_heads(paths)
        self.report.headers_read += len(paths)
        for found in await self._io.compute(self._judge, paths, heads):
            self._take(found)

    def _judge(self, paths: Sequence[Path], heads: Sequence[FileHead | OSError]) -> list[_Found]:
        """Runs in a thread, and touches nothing."""
        found = []
        for path, head in zip(paths, heads, strict=True):
            try:
                if isinstance(head, OSError):
                    raise head
                found.append(_Found(path, self._read_header(path, head), None))
            except (ChunkError, OSError) as error:
                found.append(_Found(path, None, error))
        return found

    def _take(self, found: _Found) -> None:
        header = found.header
        if header is None:
            if isinstance(found.error, ForeignFile):
                self.report.foreign += 1
            else:
                self.report.damaged += 1
                log.warning("chunk file %s is skipped: %s", found.path, found.error)
            return
        row = IndexRow.of(header.key, header.num_tokens, header.file_bytes)
        row.created_s = row.used_s = self._now_s
        layout = Layout(header.key.fingerprint, header.shape)
        if layout == self._layout:
            self.report.rows[header.key.digest] = row
        else:
            self.report.foreign += 1
        self._catalog.add(header.key.digest, row, layout)


def digests_of(names: list[str], folder: str) -> list[bytes] | None:
    """The digests that these files of `folder` are named by, or None where one is not the name of a chunk's file."""
    if not names:
        return []
    parts = "".join(names).split(CHUNK_SUFFIX)
    # names of one length, and so are the parts between the suffixes: each suffix is at the end of its name
    if set(map(len, names)) != {ID_CHARS + len(CHUNK_SUFFIX)} or parts.pop() or set(map(len, parts)) != {ID_CHARS}:
        return None
    text = "".join(parts)
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    # upper-case letters and spaces are taken for hex digits as well
    if (
        text != text.lower()
        or len(raw) != DIGEST_BYTES * len(names)
        or set(raw[::DIGEST_BYTES]) != set(bytes.fromhex(folder))
    ):
        return None
    return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]
