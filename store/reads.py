"""Reading layers from the tiers below into pool entries: one read for all who wait for it, whoever of them gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from kvblend.store.errors import ChunkDamaged
from kvblend.store.pool import HostPool, PoolEntry
from kvblend.store.tasks import TaskSet

OnFailure = Callable[[PoolEntry, Exception], None]
OnComplete = Callable[[PoolEntry], None]


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
        """Return when the layers are in memory. Missing ones are read, each contiguous run of them in one operation.

        Raises ChunkDamaged when one of them cannot be had, whatever the reason.
        """
        wanted = sorted(set(layers))
        missing = [index for index in wanted if entry.layers[index] is None]
        if not missing:
            return
        fresh = [index for index in missing if index not in entry.reads]
        if fresh:
            self._check_readable(entry)
        for first, stop in _runs(fresh):
            self._start(entry, first, stop)
        # unlike awaiting the tasks, this leaves them alone when the waiter is cancelled
        await asyncio.wait({entry.reads[index] for index in missing})
        if any(entry.layers[index] is None for index in missing):
            raise ChunkDamaged(entry.failure or "a layer could not be read")

    def is_current(self, entry: PoolEntry) -> bool:
        """Whether the chunk is still stored as this entry has it: neither gone nor stored anew since."""
        return self._pool.get(entry.key.digest) is entry

    def _check_readable(self, entry: PoolEntry) -> None:
        if entry.failure is not None:
            raise ChunkDamaged(entry.failure)
        if self.closed or entry.source is None:
            raise ChunkDamaged("the store was closed before all layers were read")

    def _start(self, entry: PoolEntry, first: int, stop: int) -> None:
        # the read holds the entry in the pool even when every lease is given back meanwhile
        self._pool.pin(entry)
        task = self._tasks.start(self._read(entry, first, stop), f"store-read-{entry.key.id[:12]}-{first}")
        for index in range(first, stop):
            entry.reads[index] = task

    async def _read(self, entry: PoolEntry, first: int, stop: int) -> None:
        try:
            if entry.source is None or entry.header is None or entry.data is None:
                raise ChunkDamaged("the chunk has no file")
            await entry.source.read_layers(entry.header, entry.data, first, stop)
        except Exception as error:  # whatever it was, the waiters get a miss and the store goes on
            if entry.failure is None:
                entry.failure = str(error) or type(error).__name__
                self._on_failure(entry, error)
        else:
            entry.mark_ready(first, stop)
            self.layers_read += stop - first
            self.bytes_read += sum(span.length for span in entry.header.layers[first:stop])
            if self.on_complete is not None and entry.is_ready:
                self.on_complete(entry)
        finally:
            for index in range(first, stop):
                del entry.reads[index]
            self._pool.unpin(entry)


def _runs(indexes: list[int]) -> Iterator[tuple[int, int]]:
    """The `(first, stop)` of each contiguous run in an ascending list."""
    first = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield indexes[first], indexes[at - 1] + 1
            first = at
