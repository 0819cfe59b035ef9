"""What lies in a store's folder when it is opened: names are listed, only what the catalog does not know is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
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
SLOW_FILES = 256
"""From so many files on, a start without an index is slow enough to warn of."""

ID_CHARS = 2 * DIGEST_BYTES
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
        self._expected = _names_by_folder(itertools.chain(known.rows, known.foreign))
        self._vanished: list[str] = []
        self._unknown: list[Path] = []
        self.report = ScanReport(known.rows)

    async def run(self) -> ScanReport:
        """Walk. Raises OSError when the folder itself cannot be listed."""
        names = await self._io.list_folder(self._folder)
        async with asyncio.TaskGroup() as group:
            for name in names:
                if len(name) == 2 and set(name) <= set("0123456789abcdef"):
                    group.create_task(self._list(self._folder / name))
        self._forget_vanished()
        if self._unknown and not self._known.was_made:
            level = logging.WARNING if len(self._unknown) >= SLOW_FILES else logging.INFO
            log.log(level, "store %s has no index: %d chunk files are read", self._folder.parent, len(self._unknown))
        batches = [self._unknown[at : at + SCAN_FILES_MAX] for at in range(0, len(self._unknown), SCAN_FILES_MAX)]
        # a few at a time: a job is long, and 100,000 names in tasks would be memory for nothing
        for at in range(0, len(batches), 16):
            await asyncio.gather(*(self._read(batch) for batch in batches[at : at + 16]))
        return self.report

    async def _list(self, folder: Path) -> None:
        try:
            names = await self._io.list_folder(folder)
        except OSError as error:
            log.warning("store folder %s cannot be read and is skipped: %s", folder, error)
            return
        for name in [one for one in names if one.endswith(TEMP_SUFFIX)]:
            if _is_temp_name(name):
                with contextlib.suppress(OSError):
                    await self._io.remove(folder / name)
        # names in whole sets, for there may be a hundred thousand: only those that nobody expects are looked at
        here = set(names)
        expected = self._expected.pop(folder.name, set())
        self._vanished += expected - here
        self._unknown += [folder / name for name in sorted(here - expected) if _is_chunk_name(name)]

    def _forget_vanished(self) -> None:
        for names in (self._vanished, *self._expected.values()):
            for name in names:
                digest = bytes.fromhex(name[:ID_CHARS])
                self._known.rows.pop(digest, None)
                self._known.foreign.discard(digest)
                self._catalog.remove(digest)
        self.report.foreign += len(self._known.foreign)

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


def _names_by_folder(digests: Iterable[bytes]) -> dict[str, set[str]]:
    """The files of these chunks: names by the folder that they should lie in."""
    found: dict[str, set[str]] = {f"{number:02x}": set() for number in range(256)}
    for name in [digest.hex() for digest in digests]:
        found[name[:2]].add(name + CHUNK_SUFFIX)
    return found
