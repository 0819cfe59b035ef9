"""The few operations on files that the disk tier needs: as a protocol, and on aiofiles with threads of their own."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from aiofiles.os import wrap

from kvblend.store.errors import ChunkError
from kvblend.store.format import ALIGNMENT_BYTES, Buffer, header_region_bytes
from kvblend.store.tasks import end_threads

FILE_MODE = 0o600
FOLDER_MODE = 0o700
"""Of what a store makes: texts can be read off the token ids in it, so they are its owner's alone."""

P = ParamSpec("P")
T = TypeVar("T")


class FileHead(NamedTuple):
    """The first bytes of a chunk file, its header region if it has one, and the file's size in bytes."""

    first: bytes
    file_bytes: int


class FileRead(NamedTuple):
    """Bytes of the file `path` from `offset` on, as many as `view` has room for; `then` runs where it was filled."""

    path: Path
    offset: int
    view: memoryview
    then: Callable[[], None] | None = None


class DiskIO(Protocol):
    """What the disk tier asks of a disk. Every method may raise OSError; none blocks the event loop."""

    async def list_folder(self, path: Path) -> list[str]:
        """Names in a folder, in no order. A link to a folder is none."""

    async def list_folders(self, paths: Sequence[Path]) -> list[list[str] | OSError]:
        """The names in each folder, or the error that kept it from being listed."""

    async def read_heads(self, paths: Sequence[Path]) -> list[FileHead | OSError]:
        """The head of each file, or the error that kept it from being read."""

    async def read_into(self, reads: Sequence[FileRead]) -> list[int | Exception]:
        """The number of bytes of each read, or what went wrong with it, one after another.

        It may be less than asked for; 0 bytes mean the end of the file. Where `view` is full `then` runs, off the event
        loop and without a way back to it in between; what that raises has gone wrong.
        """

    async def write_file(self, path: Path, parts: Sequence[Buffer]) -> int:
        """Write the parts one after another as the whole file and fsync it; the file's size in bytes."""

    async def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing `target`."""

    async def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""

    async def make_folder(self, path: Path) -> None:
        """Make a folder; one that is there is no error, a link to one is."""

    async def sync_folder(self, path: Path) -> None:
        """Fsync a folder, so that what was renamed or made in it survives a loss of power."""

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking or long function off the event loop."""

    async def close(self) -> None:
        """Wait for what is running and end the threads. Nothing may be asked afterwards."""


class AiofilesIO:
    """`DiskIO` on the local file system. Each method is one job in a pool of as many threads as there are cores."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="kvblend-store")

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the pool."""

        def job() -> T:
            return function(*args, **kwargs)

        return await wrap(job)(executor=self._executor)

    async def list_folder(self, path: Path) -> list[str]:
        """Names in a folder, in no order."""
        return await self.compute(_list_folder, path)

    async def list_folders(self, paths: Sequence[Path]) -> list[list[str] | OSError]:
        """The names in each folder, all in one job."""
        return await self.compute(_list_folders, paths)

    async def read_heads(self, paths: Sequence[Path]) -> list[FileHead | OSError]:
        """The head of each file, all in one job."""
        return await self.compute(_read_heads, paths)

    async def read_into(self, reads: Sequence[FileRead]) -> list[int | Exception]:
        """Read until each view is full or its file ends, all in one job."""
        return await self.compute(_read_all, reads)

    async def write_file(self, path: Path, parts: Sequence[Buffer]) -> int:
        """Write and fsync a whole file, all in one job."""
        return await self.compute(write_whole, path, parts)

    async def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing `target`."""
        await self.compute(os.replace, source, target)

    async def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""
        await self.compute(_remove, path)

    async def make_folder(self, path: Path) -> None:
        """Make a folder; one that is there is no error."""
        await self.compute(_make_folder, path)

    async def sync_folder(self, path: Path) -> None:
        """Fsync a folder."""
        await self.compute(sync_folder, path)

    async def close(self) -> None:
        """End the threads once their jobs are done, without making the event loop wait for them."""
        await end_threads(self._executor)


def _list_folder(path: Path) -> list[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _list_folders(paths: Sequence[Path]) -> list[list[str] | OSError]:
    found: list[list[str] | OSError] = []
    for path in paths:
        try:
            found.append(_list_folder(path))
        except OSError as error:
            found.append(error)
    return found


def _make_folder(path: Path) -> None:
    os.makedirs(path, FOLDER_MODE, exist_ok=True)
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "a link, which could lead out of the store, is no folder", str(path))


def sync_folder(path: Path) -> None:
    """Fsync a folder, blocking."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, parts: Sequence[Buffer]) -> int:
    """Write and fsync a whole file, blocking; its size in bytes. A link at `path` is refused, not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, FILE_MODE), "wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[file.write(rest) or 0 :]
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file, blocking. Raises OSError, for a link and any other kind of file too."""
    # not blocking, so that a pipe put there by hand cannot hold a thread for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def read_head(path: Path) -> FileHead:
    """The head of one file, blocking. Raises OSError."""
    descriptor = open_regular(path)
    try:
        first = os.pread(descriptor, ALIGNMENT_BYTES, 0)
        # a head that promises nonsense is returned as it is: the parser says what is wrong with it
        with contextlib.suppress(ChunkError):
            region = header_region_bytes(first)
            while len(first) < region and (more := os.pread(descriptor, region - len(first), len(first))):
                first += more
        return FileHead(first, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _read_heads(paths: Sequence[Path]) -> list[FileHead | OSError]:
    heads: list[FileHead | OSError] = []
    for path in paths:
        try:
            heads.append(read_head(path))
        except OSError as error:
            heads.append(error)
    return heads


def _read_all(reads: Sequence[FileRead]) -> list[int | Exception]:
    done: list[int | Exception] = []
    for read in reads:
        try:
            done.append(_read_into(read))
        except Exception as error:  # handed to whoever asked for this one: the others go on
            done.append(error)
    return done


def _read_into(read: FileRead) -> int:
    descriptor = open_regular(read.path)
    try:
        done, room = 0, len(read.view)
        while done < room and (got := os.preadv(descriptor, [read.view[done:]], read.offset + done)):
            done += got
    finally:
        os.close(descriptor)
    if read.then is not None and done == room:
        read.then()
    return done


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
