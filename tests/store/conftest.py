"""Chunks to store, stores that close themselves, and a disk with planted faults."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvblend.store.disk import DiskTier, ScanReport
from kvblend.store.errors import ChunkDamaged
from kvblend.store.files import AiofilesIO, FileHead, FileRead
from kvblend.store.format import Buffer, KVShape
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore

SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=4, dtype="float32")
FINGERPRINT = "model-a"
BUDGET = 1 << 20


@dataclass(frozen=True)
class Sample:
    """A chunk with bytes that follow from its number."""

    ids: tuple[int, ...]
    key: ChunkKey
    layers: list[bytearray]

    @classmethod
    def make(
        cls, number: int = 0, tokens: int = 5, shape: KVShape = SHAPE, fingerprint: str = FINGERPRINT, salt: str = ""
    ) -> Sample:
        source = random.Random(number)
        ids = tuple(range(number, number + tokens))
        layers = [bytearray(source.randbytes(shape.layer_bytes(tokens))) for _ in range(shape.num_layers)]
        return cls(ids, ChunkKey.of(fingerprint, salt, (1, 2), ids), layers)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.layers))

    def path(self, root: Path) -> Path:
        return root / "chunks" / self.key.id[:2] / f"{self.key.id}.kvc"


class FaultyIO(AiofilesIO):
    """The real disk, with errors, gates, short or cut transfers and flipped bits where a test plants them.

    `fail(name, error)` makes the next call of an operation raise. `gate(name)` makes its calls wait: `arrived[name]`
    counts those that came, `open_gate(name)` lets them go.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.arrived: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
        self.read_bytes_max: int | None = None
        self.write_cut_bytes = 0
        self.flip_reads = False
        self._errors: dict[str, list[OSError]] = defaultdict(list)
        self._gates: dict[str, asyncio.Event] = {}

    def fail(self, name: str, error: OSError) -> None:
        self._errors[name].append(error)

    def heal(self) -> None:
        self._errors.clear()

    def gate(self, name: str) -> None:
        self._gates[name] = asyncio.Event()

    def open_gate(self, name: str) -> None:
        self._gates.pop(name).set()

    async def _enter(self, name: str) -> None:
        self.calls.append(name)
        self.arrived[name].release()
        if (gate := self._gates.get(name)) is not None:
            await gate.wait()
        if self._errors[name]:
            raise self._errors[name].pop(0)

    async def list_folder(self, path: Path) -> list[str]:
        await self._enter("list_folder")
        return await super().list_folder(path)

    async def list_folders(self, paths: Sequence[Path]) -> list[list[str] | OSError]:
        try:
            await self._enter("list_folders")
        except OSError as error:
            return [error for _ in paths]
        return await super().list_folders(paths)

    async def read_heads(self, paths: Sequence[Path]) -> list[FileHead | OSError]:
        try:
            await self._enter("read_heads")
        except OSError as error:
            return [error for _ in paths]
        heads = await super().read_heads(paths)
        if (gate := self._gates.get("heads_read")) is not None:
            self.arrived["heads_read"].release()
            await gate.wait()
        return heads

    async def read_into(self, reads: Sequence[FileRead]) -> list[int | Exception]:
        await self._enter("read_into")
        cut = [read._replace(view=read.view[: self.read_bytes_max], then=None) for read in reads]
        results = await super().read_into(cut)
        return [await self._finish(read, got) for read, got in zip(reads, results, strict=True)]

    async def _finish(self, read: FileRead, got: int | Exception) -> int | Exception:
        if self.flip_reads and isinstance(got, int) and got:
            read.view[0] ^= 1
        try:
            if read.then is not None and got == len(read.view):
                await self.compute(read.then)
        except ChunkDamaged as error:
            return error
        return got

    async def write_file(self, path: Path, parts: Sequence[Buffer]) -> int:
        await self._enter("write_file")
        if self.write_cut_bytes:
            whole = b"".join(parts)
            parts = [whole[: -self.write_cut_bytes]]
        return await super().write_file(path, parts)

    async def rename(self, source: Path, target: Path) -> None:
        await self._enter("rename")
        await super().rename(source, target)

    async def remove(self, path: Path) -> None:
        await self._enter("remove")
        await super().remove(path)

    async def make_folder(self, path: Path) -> None:
        await self._enter("make_folder")
        await super().make_folder(path)

    async def sync_folder(self, path: Path) -> None:
        await self._enter("sync_folder")
        await super().sync_folder(path)


Make = Callable[..., Sample]
OpenStore = Callable[..., Awaitable[ChunkStore]]


@pytest.fixture(scope="session")
def sample() -> Make:
    return Sample.make


@pytest.fixture(scope="session")
def shape() -> KVShape:
    return SHAPE


@pytest.fixture
def io() -> FaultyIO:
    """A disk for the test's store, which closes it. It has no thread until it is used."""
    return FaultyIO()


@pytest.fixture(scope="session")
def new_io() -> type[FaultyIO]:
    """For tests that open many disks."""
    return FaultyIO


@pytest.fixture
async def open_store() -> AsyncIterator[OpenStore]:
    """Opens stores with the samples' shape and model, and closes them at the end."""
    stores: list[ChunkStore] = []

    async def open_one(
        root: Path | None,
        io: AiofilesIO | None = None,
        budget: int = BUDGET,
        shape: KVShape = SHAPE,
        fingerprint: str = FINGERPRINT,
        **more: Any,
    ) -> ChunkStore:
        # nobody gives a lease back while a test waits for room in vain
        more.setdefault("wait_s", 0.05)
        stores.append(await ChunkStore.open(root, shape, fingerprint, budget, io, **more))
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


Flip = Callable[[Path, int], None]
OpenTier = Callable[..., Awaitable[tuple[DiskTier, ScanReport]]]


@pytest.fixture
async def open_tier(tmp_path: Path) -> AsyncIterator[OpenTier]:
    """Opens the disk tier of the test's folder; the one opened before is closed first."""
    tiers: list[DiskTier] = []

    async def open_one(io: AiofilesIO | None = None, fingerprint: str = FINGERPRINT) -> tuple[DiskTier, ScanReport]:
        while tiers:
            await tiers.pop().close()
        tier, found = await DiskTier.open(tmp_path, SHAPE, fingerprint, io)
        tiers.append(tier)
        return tier, found

    yield open_one
    for tier in tiers:
        await tier.close()


@pytest.fixture
def flip_byte() -> Flip:
    """Damages the byte of a file at an offset; a second time mends it."""

    def flip(path: Path, at: int) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))

    return flip
