"""The durable copy of the index: one sqlite3 file beside the chunks, so that a start need not open every chunk.

The files are the truth. What the catalog lacks is read from them, what it has too much is dropped, and one that is
missing, damaged or of another version is made anew. Changes are gathered and committed in one thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvblend.store.catalog_rows import pack_row, unpack_rows
from kvblend.store.files import FILE_MODE
from kvblend.store.format import KVShape
from kvblend.store.index import IndexRow, collector_paused
from kvblend.store.keys import FORMAT_VERSION
from kvblend.store.tasks import end_threads

T = TypeVar("T")
log = logging.getLogger("kvblend.store")

CATALOG_NAME = "index.sqlite3"
CATALOG_VERSION = 2
FLUSH_S = 0.5
"""How long changes are gathered before they are committed."""

_SIDE_SUFFIXES = ("-wal", "-shm", "-journal")
_PRAGMAS = ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "trusted_schema=OFF")
_TABLES = (
    "CREATE TABLE layouts(id INTEGER PRIMARY KEY, version INTEGER NOT NULL, fingerprint TEXT NOT NULL,"
    " num_layers INTEGER NOT NULL, num_kv_heads INTEGER NOT NULL, head_dim INTEGER NOT NULL, dtype TEXT NOT NULL,"
    " UNIQUE(version, fingerprint, num_layers, num_kv_heads, head_dim, dtype))",
    # `row` has the digest, too: one column is read in half the time of two
    "CREATE TABLE chunks(digest BLOB PRIMARY KEY, layout INTEGER NOT NULL, row BLOB NOT NULL) WITHOUT ROWID",
)
_READ = "SELECT row FROM chunks WHERE layout = ?"
_WRITE = "INSERT OR REPLACE INTO chunks VALUES(?, ?, ?)"


class Layout(NamedTuple):
    """What all chunks of one model in one stored form share."""

    fingerprint: str
    shape: KVShape
    version: int = FORMAT_VERSION


@dataclass(slots=True)
class Remembered:
    """What the catalog knew when it was opened: the chunks of this store's layout, and files of other layouts."""

    rows: dict[bytes, IndexRow] = field(default_factory=dict)
    foreign: set[bytes] = field(default_factory=set)
    was_made: bool = True


class Catalog:
    """One store's catalog. Its methods return at once; `close` waits until everything is committed.

    An error of sqlite ends its work with one warning, and the next start reads the files instead.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        """Use `open`."""
        self._path = path
        self._layout = layout
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvblend-catalog")
        self._connection: sqlite3.Connection | None = None
        self._layout_ids: dict[Layout, int] = {}
        self._changes: dict[bytes, tuple[Layout, IndexRow] | None] = {}
        self._uses: dict[bytes, IndexRow] = {}
        self._flusher: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    @classmethod
    async def open(cls, path: Path, layout: Layout) -> tuple[Catalog, Remembered]:
        """Open or make the catalog at `path`, in a folder that nobody else has open; whatever lies there, it opens."""
        catalog = cls(path, layout)
        opening = asyncio.ensure_future(catalog._run(catalog._open))
        try:
            return catalog, await asyncio.shield(opening)
        except BaseException:
            await asyncio.wait({opening})
            await catalog.close()
            raise

    def add(self, digest: bytes, row: IndexRow, layout: Layout | None = None) -> None:
        """Remember a chunk, by default of this store's layout."""
        self._uses.pop(digest, None)
        self._change(digest, (layout or self._layout, row))

    def remove(self, digest: bytes) -> None:
        """Remember a chunk no longer."""
        self._uses.pop(digest, None)
        self._change(digest, None)

    def use(self, digest: bytes, row: IndexRow) -> None:
        """The counts of a remembered chunk changed; they are read when they are written, and a crash may lose them."""
        if self._connection is not None and digest not in self._changes:
            self._uses[digest] = row
            self._start_flusher()

    async def close(self) -> None:
        """Commit what is left and give file and thread back."""
        self._closing.set()
        if self._flusher is not None:
            await self._flusher
        await self._flush()
        await self._run(self._disconnect)
        await end_threads(self._executor)

    def _change(self, digest: bytes, change: tuple[Layout, IndexRow] | None) -> None:
        if self._connection is not None:
            self._changes[digest] = change
            self._start_flusher()

    def _start_flusher(self) -> None:
        if self._flusher is None and not self._closing.is_set():
            self._flusher = asyncio.create_task(self._flush_soon(), name="store-catalog")

    async def _flush_soon(self) -> None:
        while (self._changes or self._uses) and not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._closing.wait()
            await self._flush()
        self._flusher = None

    async def _flush(self) -> None:
        changes, self._changes = self._changes, {}
        uses, self._uses = self._uses, {}
        if self._connection is None or not (changes or uses):
            return
        try:
            await self._run(lambda: self._write(changes, uses))
        except (sqlite3.Error, OSError) as error:
            log.warning("%s is given up until the next start, the chunks are not: %s", self._path, error)
            self._changes.clear()
            self._uses.clear()
            await self._run(self._disconnect)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    # ---- in the catalog's thread ----

    def _open(self) -> Remembered:
        was_there = os.path.lexists(self._path)
        try:
            if was_there:
                return self._read()
        except (sqlite3.Error, OSError, ValueError, OverflowError) as error:
            log.warning("%s cannot be used and is built anew from the chunk files: %s", self._path, error)
        try:
            self._make()
        except (sqlite3.Error, OSError) as error:
            log.warning("%s cannot be made, every start will read all chunk files: %s", self._path, error)
            self._disconnect()
        return Remembered(was_made=was_there)

    def _read(self) -> Remembered:
        for suffix in ("", *_SIDE_SUFFIXES):
            path = self._path.with_name(self._path.name + suffix)
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                raise OSError(f"{path.name} is not a regular file")
        connection = self._connect()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        tables = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        if version != CATALOG_VERSION or sorted(sql for (sql,) in tables) != sorted(_TABLES):
            raise ValueError(f"its version is {version}, or its tables are not those of version {CATALOG_VERSION}")
        own = self._layout_id(self._layout)
        with collector_paused():
            found = Remembered(
                unpack_rows(list(map(itemgetter(0), connection.execute(_READ, (own,)))), self._layout.shape)
            )
        (layouts,) = connection.execute("SELECT count(*) FROM layouts").fetchone()
        if layouts > 1:
            others = connection.execute("SELECT digest FROM chunks WHERE layout != ?", (own,))
            found.foreign.update(digest for (digest,) in others)
        return found

    def _make(self) -> None:
        self._disconnect()
        for suffix in ("", *_SIDE_SUFFIXES):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path.with_name(self._path.name + suffix))
        connection = self._connect()
        connection.execute("BEGIN IMMEDIATE")
        for table in _TABLES:
            connection.execute(table)
        connection.execute(f"PRAGMA user_version={CATALOG_VERSION}")
        connection.execute("COMMIT")

    def _connect(self) -> sqlite3.Connection:
        self._layout_ids.clear()
        # sqlite gives the files beside it the same mode
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE))
        self._connection = sqlite3.connect(self._path, isolation_level=None)
        for pragma in _PRAGMAS:
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _layout_id(self, layout: Layout) -> int:
        known = self._layout_ids.get(layout)
        if known is None and self._connection is not None:
            shape = layout.shape
            values = (
                layout.version, layout.fingerprint, shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype,
            )  # fmt: skip
            self._connection.execute("INSERT OR IGNORE INTO layouts VALUES(NULL, ?, ?, ?, ?, ?, ?)", values)
            (known,) = self._connection.execute(
                "SELECT id FROM layouts WHERE (version, fingerprint, num_layers, num_kv_heads, head_dim, dtype)"
                " = (?, ?, ?, ?, ?, ?)",
                values,
            ).fetchone()
            self._layout_ids[layout] = known
        return known or 0

    def _write(self, changes: dict[bytes, tuple[Layout, IndexRow] | None], uses: dict[bytes, IndexRow]) -> None:
        connection = self._connection
        if connection is None:
            return
        kept = [(digest, *change) for digest, change in changes.items() if change is not None]
        gone = [(digest,) for digest, change in changes.items() if change is None]
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany("DELETE FROM chunks WHERE digest = ?", gone)
            connection.executemany(
                _WRITE, [(digest, self._layout_id(layout), pack_row(digest, row)) for digest, layout, row in kept]
            )
            connection.executemany(
                "UPDATE chunks SET row = ? WHERE digest = ?",
                [(pack_row(digest, row), digest) for digest, row in uses.items()],
            )
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            self._layout_ids.clear()
            raise
