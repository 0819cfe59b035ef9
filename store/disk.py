"""The disk tier: one file per chunk under `chunks/ab/<id>.kvc`, written whole or not at all, verified when read.

It knows where files lie and whether their bytes are right; which chunks there are is the store's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvblend.store.errors import ChunkDamaged, ChunkError, ForeignFile, StoreUnusable, StoreWriteFailed
from kvblend.store.files import AiofilesIO, DiskIO, FileHead
from kvblend.store.format import (
    Buffer,
    ChunkHeader,
    KVShape,
    LayerSpan,
    align,
    build_header,
    checksum,
    parse_header,
)
from kvblend.store.index import IndexRow
from kvblend.store.keys import ChunkKey
from kvblend.store.root import claim_root, release_root

log = logging.getLogger("kvblend.store")

CHUNKS_NAME = "chunks"
DAMAGED_NAME = "damaged"
CHUNK_SUFFIX = ".kvc"
TEMP_SUFFIX = ".tmp"
SCAN_FILES_MAX = 64
"""How many files one job of the scan opens."""

_FOLDER_NAME = re.compile(r"[0-9a-f]{2}")
_FILE_STEM = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class ScanReport:
    """What lies in the folder: usable chunks by digest, and how many files were skipped for which reason."""

    rows: dict[bytes, IndexRow] = field(default_factory=dict)
    damaged: int = 0
    foreign: int = 0


def allocate(num_bytes: int) -> memoryview:
    """Writable zeroed memory on page borders; pages cost nothing until they are filled."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class DiskTier:
    """The files of one store folder, for one model's fingerprint and KV shape."""

    def __init__(self, root: Path, shape: KVShape, fingerprint: str, io: DiskIO, lock: int) -> None:
        self._root = root
        self._shape = shape
        self._fingerprint = fingerprint
        self._io = io
        self._lock = lock
        self._synced_folders: set[Path] = set()

    @classmethod
    async def open(
        cls, root: Path, shape: KVShape, fingerprint: str, io: DiskIO | None = None
    ) -> tuple[DiskTier, ScanReport]:
        """Claim the folder, sweep temporary files and read every header.

        `io` is closed with the tier, or here when opening fails. Raises StoreUnusable.
        """
        io = io or AiofilesIO()
        claim = asyncio.ensure_future(io.compute(claim_root, root))
        try:
            tier = cls(root, shape, fingerprint, io, await asyncio.shield(claim))
            await io.make_folder(root / CHUNKS_NAME)
            await io.sync_folder(root)
            return tier, await tier._scan()
        except BaseException as error:
            # a claim that outlives its cancelled opener would keep the folder locked
            await asyncio.wait({claim})
            if not claim.cancelled() and claim.exception() is None:
                release_root(claim.result())
            await io.close()
            if isinstance(error, OSError):
                raise StoreUnusable(root, str(error)) from error
            raise

    async def close(self) -> None:
        """Wait for what is running, end the threads and give the folder back."""
        await self._io.close()
        release_root(self._lock)

    def path_of(self, digest: bytes) -> Path:
        """Where the file of a chunk lies."""
        name = digest.hex()
        return self._root / CHUNKS_NAME / name[:2] / (name + CHUNK_SUFFIX)

    async def write(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview]) -> IndexRow:
        """Write a chunk's file and make it durable. `layers` are payloads of one of `KVShape.layer_lengths`.

        Raises StoreWriteFailed, with no file of this chunk left behind.
        """
        checksums = await self._io.compute(_checksum_all, layers)
        header, region = build_header(key, packed_ids, self._shape, checksums, len(layers[0]))
        target = self.path_of(key.digest)
        temp = target.with_suffix(TEMP_SUFFIX)
        leftover = temp
        try:
            await self._make_chunk_folder(target.parent)
            size = await self._io.write_file(temp, _file_parts(region, layers))
            if size != header.file_bytes:
                raise OSError(f"{size} of {header.file_bytes} bytes were written")
            await self._io.rename(temp, target)
            leftover = target
            await self._io.sync_folder(target.parent)
        except BaseException as error:
            self._synced_folders.discard(target.parent)
            with contextlib.suppress(OSError):
                await self._io.remove(leftover)
            if isinstance(error, OSError):
                raise StoreWriteFailed(f"chunk {key.id} could not be written to {target}: {error}") from error
            raise
        return IndexRow(header.num_tokens, header.file_bytes)

    async def read_header(self, digest: bytes) -> ChunkHeader:
        """The header of a chunk's file. Raises OSError, ChunkDamaged, or ForeignFile."""
        path = self.path_of(digest)
        (head,) = await self._io.read_heads([path])
        if isinstance(head, OSError):
            raise head
        return self._check_head(path, head)

    async def read_layers(self, header: ChunkHeader, data: memoryview, first: int, stop: int) -> None:
        """Read layers `first..stop-1` in one go into their places in `data` (the file's data) and verify them.

        Raises OSError or ChunkDamaged.
        """
        spans = header.layers[first:stop]
        start, end = spans[0].offset, spans[-1].offset + spans[-1].length
        path = self.path_of(header.key.digest)
        while start < end:
            got = await self._io.read_into(path, header.data_start + start, data[start:end])
            if not got:
                raise ChunkDamaged(f"the file ends at byte {header.data_start + start}")
            start += got
        await self._io.compute(_verify, spans, data, first)

    async def set_aside(self, digest: bytes) -> None:
        """Move a damaged file to `damaged/`, or remove it where that fails. Raises OSError when both do."""
        path = self.path_of(digest)
        folder = self._root / DAMAGED_NAME
        try:
            await self._io.make_folder(folder)
            await self._io.rename(path, folder / path.name)
        except FileNotFoundError:
            return
        except OSError:
            await self._io.remove(path)

    async def remove(self, digest: bytes) -> None:
        """Remove a chunk's file for good. Raises OSError."""
        path = self.path_of(digest)
        await self._io.remove(path)
        await self._io.sync_folder(path.parent)

    async def copy(self, view: memoryview) -> memoryview:
        """A writable copy of the bytes."""
        return memoryview(await self._io.compute(bytearray, view))

    async def _make_chunk_folder(self, folder: Path) -> None:
        if folder not in self._synced_folders:
            await self._io.make_folder(folder)
            await self._io.sync_folder(folder.parent)
            self._synced_folders.add(folder)

    def _check_head(self, path: Path, head: FileHead) -> ChunkHeader:
        header = parse_header(head.first, head.file_bytes)
        if header.key.id != path.stem:
            raise ChunkDamaged("its name is not the id of its content")
        if header.key.fingerprint != self._fingerprint:
            raise ForeignFile("it was computed with another model")
        if header.shape != self._shape:
            raise ForeignFile(f"its shape is {header.shape}; this store holds {self._shape}")
        return header

    async def _scan(self) -> ScanReport:
        report = ScanReport()
        folder = self._root / CHUNKS_NAME
        names = await self._io.list_folder(folder)
        async with asyncio.TaskGroup() as group:
            for name in names:
                if _FOLDER_NAME.fullmatch(name):
                    group.create_task(self._scan_folder(folder / name, report))
        if report.foreign:
            log.warning("store %s: %d files of another model, shape or version left alone", self._root, report.foreign)
        return report

    async def _scan_folder(self, folder: Path, report: ScanReport) -> None:
        try:
            names = [Path(name) for name in await self._io.list_folder(folder)]
        except OSError as error:
            log.warning("store folder %s cannot be read and is skipped: %s", folder, error)
            return
        known = [folder / name for name in names if _FILE_STEM.fullmatch(name.stem)]
        for path in known:
            if path.suffix == TEMP_SUFFIX:
                with contextlib.suppress(OSError):
                    await self._io.remove(path)
        paths = [path for path in known if path.suffix == CHUNK_SUFFIX]
        for begin in range(0, len(paths), SCAN_FILES_MAX):
            batch = paths[begin : begin + SCAN_FILES_MAX]
            heads = await self._io.read_heads(batch)
            await self._io.compute(self._judge, batch, heads, report)

    def _judge(self, paths: Sequence[Path], heads: Sequence[FileHead | OSError], report: ScanReport) -> None:
        """Sort files into usable, foreign and damaged. Runs in a thread, and changes `report` key by key only."""
        for path, head in zip(paths, heads, strict=True):
            try:
                if isinstance(head, OSError):
                    raise head
                header = self._check_head(path, head)
            except ForeignFile:
                report.foreign += 1
            except (ChunkError, OSError) as error:
                report.damaged += 1
                log.warning("chunk file %s is skipped: %s", path, error)
            else:
                report.rows[header.key.digest] = IndexRow(header.num_tokens, header.file_bytes)


def _checksum_all(layers: Sequence[memoryview]) -> list[bytes]:
    return [checksum(layer) for layer in layers]


def _verify(spans: Sequence[LayerSpan], data: memoryview, first: int) -> None:
    for index, span in enumerate(spans, start=first):
        if checksum(data[span.offset : span.offset + span.length]) != span.checksum:
            raise ChunkDamaged(f"the checksum of layer {index} does not match")


def _file_parts(region: bytes, layers: Sequence[memoryview]) -> list[Buffer]:
    """A file's bytes in order, without copying a layer."""
    parts: list[Buffer] = [region]
    for layer in layers:
        parts.append(layer)
        if padding := align(layer.nbytes) - layer.nbytes:
            parts.append(bytes(padding))
    return parts
