"""The disk tier: one file per chunk under `chunks/ab/<id>.kvc`, written whole or not at all, verified when read.

It knows where files lie and whether their bytes are right; which chunks there are is the store's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvblend.store.aside import BYTES_MAX, NOTHING, Aside, aside_bytes_max, trim_aside
from kvblend.store.catalog import CATALOG_NAME, Catalog, Layout
from kvblend.store.errors import ChunkDamaged, ForeignFile, StoreUnusable, StoreWriteFailed
from kvblend.store.files import AiofilesIO, DiskIO, FileHead, FileRead
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
from kvblend.store.limits import StoreLimits
from kvblend.store.root import claim_root, release_root
from kvblend.store.scan import CHUNK_SUFFIX as CHUNK_SUFFIX
from kvblend.store.scan import TEMP_SUFFIX as TEMP_SUFFIX
from kvblend.store.scan import FolderScan
from kvblend.store.scan import ScanReport as ScanReport
from kvblend.store.tiers import LayerRun

log = logging.getLogger("kvblend.store")

CHUNKS_NAME = "chunks"
DAMAGED_NAME = "damaged"


class ReadyFile(NamedTuple):
    """A chunk file that waits to be written: its header, the bytes of its header region, and the layers."""

    header: ChunkHeader
    region: bytes
    layers: Sequence[memoryview]


class DiskTier:
    """The files of one store folder, for one model's fingerprint and KV shape."""

    def __init__(
        self,
        root: Path,
        layout: Layout,
        io: DiskIO,
        lock: int,
        catalog: Catalog,
        aside: Aside = NOTHING,
        aside_bytes_max: int = BYTES_MAX,
    ) -> None:
        """Use `open`."""
        self._root = root
        self._chunks = str(root / CHUNKS_NAME)
        self._layout = layout
        self._io = io
        self._lock = lock
        self.catalog = catalog
        self.aside = aside
        """The damaged files that are kept."""
        self._aside_bytes_max = aside_bytes_max
        self._synced_folders: set[Path] = set()

    @classmethod
    async def open(
        cls,
        root: Path,
        shape: KVShape,
        fingerprint: str,
        io: DiskIO | None = None,
        limits: StoreLimits | None = None,
    ) -> tuple[DiskTier, ScanReport]:
        """Claim the folder, sweep temporary files, and find the chunks: in the catalog, or by reading their headers.

        `io` is closed with the tier, or here when opening fails. Raises StoreUnusable.
        """
        io = io or AiofilesIO()
        layout, catalog = Layout(fingerprint, shape), None
        claim = asyncio.ensure_future(io.compute(claim_root, root))
        try:
            lock = await asyncio.shield(claim)
            if limits is not None:
                await io.compute(limits.check_folder, root)
            await io.make_folder(root / CHUNKS_NAME)
            await io.sync_folder(root)
            catalog, known = await Catalog.open(root / CATALOG_NAME, layout)
            found = await FolderScan(root / CHUNKS_NAME, layout, io, _read_header, catalog, known).run()
            if found.foreign:
                log.warning("store %s: %d files of another model, shape or version left alone", root, found.foreign)
            room = aside_bytes_max(None if limits is None else limits.disk_bytes_budget)
            aside = await io.compute(trim_aside, root / DAMAGED_NAME, room)
            return cls(root, layout, io, lock, catalog, aside, room), found
        except BaseException as error:
            if catalog is not None:
                await catalog.close()
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
        await self.catalog.close()
        await self._io.close()
        release_root(self._lock)

    def path_of(self, digest: bytes) -> Path:
        """Where the file of a chunk lies."""
        name = digest.hex()
        # one piece: joined part by part, paths are a third of what a read costs the event loop
        return Path(f"{self._chunks}/{name[:2]}/{name}{CHUNK_SUFFIX}")

    async def prepare(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview]) -> ReadyFile:
        """A chunk's file before it is written. `layers` are payloads of one of `KVShape.layer_lengths`."""
        checksums = await self._io.compute(_checksum_all, layers)
        return ReadyFile(*build_header(key, packed_ids, self._layout.shape, checksums, len(layers[0])), layers)

    async def write_ready(self, ready: ReadyFile, make_way: Callable[[], Awaitable[None]] | None = None) -> IndexRow:
        """Write a chunk's file and make it durable. Raises StoreWriteFailed, with no file of this chunk left behind.

        With `make_way` it takes an older one's place in one step: that is awaited when the new one is whole. Where the
        write fails, the older one stays, or the new one if only its name could not be made durable.
        """
        header, key = ready.header, ready.header.key
        target = self.path_of(key.digest)
        temp = target.with_suffix(TEMP_SUFFIX)
        leftover: Path | None = None
        try:
            await self._make_chunk_folder(target.parent)
            leftover = temp
            size = await self._io.write_file(temp, _file_parts(ready.region, ready.layers))
            if size != header.file_bytes:
                raise OSError(f"{size} of {header.file_bytes} bytes were written")
            if make_way is not None:
                await make_way()
            await self._io.rename(temp, target)
            leftover = target if make_way is None else None
            await self._io.sync_folder(target.parent)
        except BaseException as error:
            self._synced_folders.discard(target.parent)
            if leftover is not None:
                with contextlib.suppress(OSError):
                    await self._io.remove(leftover)
            if isinstance(error, OSError):
                raise StoreWriteFailed(f"chunk {key.id} could not be written to {target}: {error}") from error
            raise
        return IndexRow.of(key, header.num_tokens, header.file_bytes)

    async def read_header(self, digest: bytes) -> ChunkHeader:
        """The header of a chunk's file. Raises OSError, ChunkDamaged, or ForeignFile."""
        path = self.path_of(digest)
        (head,) = await self._io.read_heads([path])
        if isinstance(head, OSError):
            raise head
        header = _read_header(path, head)
        if header.key.fingerprint != self._layout.fingerprint:
            raise ForeignFile("it was computed with another model")
        if header.shape != self._layout.shape:
            raise ForeignFile(f"its shape is {header.shape}; this store holds {self._layout.shape}")
        return header

    async def read_layers(self, header: ChunkHeader, data: memoryview, first: int, stop: int) -> None:
        """Read layers `first..stop-1` in one go into their places in `data` (the file's data) and verify them.

        Raises OSError or ChunkDamaged.
        """
        (error,) = await self.read_runs([LayerRun(header, data, first, stop)])
        if error is not None:
            raise error

    async def read_runs(self, runs: Sequence[LayerRun]) -> list[Exception | None]:
        """`read_layers` for each run, all in one operation; what went wrong with each, None for nothing.

        Every operation costs the event loop about as much as a small read takes.
        """
        errors: list[Exception | None] = [None] * len(runs)
        left = [_file_read(self.path_of(run.header.key.digest), run) for run in runs]
        waiting = list(range(len(runs)))
        while waiting:
            results = await self._io.read_into([left[index] for index in waiting])
            for index, got in zip(list(waiting), results, strict=True):
                read = left[index]
                if isinstance(got, int) and 0 < got < len(read.view):
                    left[index] = read._replace(offset=read.offset + got, view=read.view[got:])
                    continue
                waiting.remove(index)
                if isinstance(got, Exception):
                    errors[index] = got
                elif not got:
                    errors[index] = ChunkDamaged(f"the file ends at byte {read.offset}")
        return errors

    async def set_aside(self, digest: bytes) -> None:
        """Move a damaged file to `damaged/`, from where the oldest leave, or remove it where that fails.

        Raises OSError when both do.
        """
        path = self.path_of(digest)
        folder = self._root / DAMAGED_NAME
        try:
            await self._io.make_folder(folder)
            await self._io.rename(path, folder / path.name)
            self.aside = await self._io.compute(trim_aside, folder, self._aside_bytes_max)
        except FileNotFoundError:
            return
        except OSError:
            await self._io.remove(path)

    async def remove(self, digest: bytes) -> None:
        """Remove a chunk's file for good. Raises OSError."""
        path = self.path_of(digest)
        await self._io.remove(path)
        await self._io.sync_folder(path.parent)

    async def discard(self, digest: bytes) -> None:
        """Remove a chunk's file, not for good: after a loss of power it may be there again. Raises OSError."""
        await self._io.remove(self.path_of(digest))

    async def copy(self, view: memoryview) -> memoryview:
        """A writable copy of the bytes."""
        return memoryview(await self._io.compute(bytearray, view))

    async def _make_chunk_folder(self, folder: Path) -> None:
        if folder not in self._synced_folders:
            await self._io.make_folder(folder)
            await self._io.sync_folder(folder.parent)
            self._synced_folders.add(folder)


def _read_header(path: Path, head: FileHead) -> ChunkHeader:
    """The header of a chunk file of any model. Raises ForeignFile and ChunkDamaged."""
    header = parse_header(head.first, head.file_bytes)
    if header.key.id != path.stem or path.parent.name != path.stem[:2]:
        raise ChunkDamaged("its name is not the id of its content")
    return header


def _checksum_all(layers: Sequence[memoryview]) -> list[bytes]:
    return [checksum(layer) for layer in layers]


def _file_read(path: Path, run: LayerRun) -> FileRead:
    """The bytes of a run, checked in the job that reads them: another job would cost the loop a small read."""
    spans = run.header.layers[run.first : run.stop]
    start, end = spans[0].offset, spans[-1].offset + spans[-1].length
    verify = functools.partial(_verify, spans, run.data, run.first)
    return FileRead(path, run.header.data_start + start, run.data[start:end], verify)


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
