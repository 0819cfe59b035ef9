"""Reading layers from the tiers below into pool entries: one read for all who wait for it, whoever of them gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvblend.store.errors import ChunkDamaged
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.tasks import TaskSet
from kvblend.store.tiers import LayerRun

OnFailure = Callable[[PoolEntry, Exception], None]
OnComplete = Callable[[PoolEntry], None]


class _Read(NamedTuple):
    """Layers `first..stop-1` of an entry, on their way."""

    entry: PoolEntry
    first: int
    stop: int

    @property
    def run(self) -> LayerRun:
        """The same for the tier. An entry that is read has a file."""
        assert self.entry.header is not None
        assert self.entry.data is not None
        return LayerRun(self.entry.header, self.entry.data, self.first, self.stop)


class LayerReader:
    """Brings layers of pinned entries into memory, each from the entry's own source.

    `on_failure` hears of each entry's first failed read; `on_complete`, once it is set, of entries that are whole.
    """

    def __init__(self, pool: HostPool, tasks: TaskSet, on_failure: OnFailure) -> None:
        self._pool = pool
        self._tasks = tasks
        self._on_failure = on_failure
        self.on_complete: OnComplete | None = None
        self.closed = False
        self.layers_read = 0
        self.bytes_read = 0

    async def ensure(self, entry: PoolEntry, layers: Iterable[int]) -> None:
        """Return when the layers are in memory. Missing ones are read, all in one operation.

        Raises ChunkDamaged when one of them cannot be had, whatever the reason.
        """
        (error,) = await self.ensure_all([entry], layers)
        if error is not None:
            raise error

    async def ensure_all(self, entries: Sequence[PoolEntry], layers: Iterable[int]) -> list[ChunkDamaged | None]:
        """Return when these layers of each entry are in memory, or cannot be had: ChunkDamaged in its place then.

        What is missing is read in one operation per tier.
        """
        wanted = sorted(set(layers))
        errors: dict[PoolEntry, ChunkDamaged | None] = {}
        missing: dict[PoolEntry, list[int]] = {}
        fresh: dict[int, list[_Read]] = {}
        for entry in dict.fromkeys(entries):
            missing[entry] = [index for index in wanted if entry.layers[index] is None]
            new = [index for index in missing[entry] if index not in entry.reads]
            if new and (error := self._unreadable(entry)) is not None:
                errors[entry], missing[entry] = error, []
                continue
            for first, stop in _runs(new):
                fresh.setdefault(id(entry.source), []).append(_Read(entry, first, stop))
        for reads in fresh.values():
            self._start(reads)
        waits = {entry.reads[index] for entry, gone in missing.items() for index in gone}
        if waits:
            # unlike awaiting the tasks, this leaves them alone when the waiter is cancelled
            await asyncio.wait(waits)
        for entry, gone in missing.items():
            if any(entry.layers[index] is None for index in gone):
                errors[entry] = ChunkDamaged(entry.failure or "a layer could not be read")
        return [errors.get(entry) for entry in entries]

    def is_current(self, entry: PoolEntry) -> bool:
        """Whether the chunk is still stored as this entry has it: neither gone nor stored anew since."""
        return self._pool.get(entry.key.digest) is entry

    def _unreadable(self, entry: PoolEntry) -> ChunkDamaged | None:
        if entry.failure is not None:
            return ChunkDamaged(entry.failure)
        if self.closed or entry.source is None or entry.header is None or entry.data is None:
            return ChunkDamaged("the store was closed before all layers were read")
        return None

    def _start(self, reads: list[_Read]) -> None:
        name = f"store-read-{reads[0].entry.key.id[:12]}-{reads[0].first}"
        for entry, _, _ in reads:
            # the read holds the entry in the pool even when every lease is given back meanwhile
            self._pool.pin(entry)
        task = self._tasks.start(self._read(reads), name)
        for entry, first, stop in reads:
            entry.reads.update(dict.fromkeys(range(first, stop), task))

    async def _read(self, reads: list[_Read]) -> None:
        """One operation for layers of one source."""
        results: list[Exception | None]
        try:
            try:
                source = reads[0].entry.source
                assert source is not None  # looked at before the start
                results = await source.read_runs([read.run for read in reads])
            except Exception as error:  # whatever it was, the waiters get a miss and the store goes on
                results = [error] * len(reads)
            for read, problem in zip(reads, results, strict=True):
                self._note(read, problem)
        finally:
            for entry, first, stop in reads:
                for index in range(first, stop):
                    del entry.reads[index]
                self._pool.unpin(entry)

    def _note(self, read: _Read, error: Exception | None) -> None:
        entry, first, stop = read
        if error is not None:
            if entry.failure is None:
                entry.failure = str(error) or type(error).__name__
                self._on_failure(entry, error)
            return
        entry.mark_ready(first, stop)
        self.layers_read += stop - first
        self.bytes_read += (stop - first) * entry.layer_bytes
        if self.on_complete is not None and entry.is_ready:
            self.on_complete(entry)


def _runs(indexes: list[int]) -> Iterator[tuple[int, int]]:
    """The `(first, stop)` of each contiguous run in an ascending list."""
    first = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield indexes[first], indexes[at - 1] + 1
            first = at
