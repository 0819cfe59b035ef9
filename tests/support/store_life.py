"""A store beside a model of it, for random sequences of everything that a store can live through."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvblend.store.errors import ChunkDamaged, StoreWriteFailed
from kvblend.store.lease import ChunkLease
from kvblend.store.maintenance import forget_catalog
from kvblend.store.store import ChunkStore

CHUNKS = 5
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES)
WRITE_STEPS = ("make_folder", "write_file", "rename", "sync_folder")
READ_STEPS = ("read_heads", "read_into")
# a byte of each part of a chunk file: of the fixed fields, of keys and values in the map, of its padding and of layers
FLIPS = (0, 8, 12, 16, 47, 48, 60, 90, 130, 170, 210, 250, 300, 350, 400, 4095, 4096, 4500, 8192, 8300, 16384, 16500)


class Life:
    """`sure` chunks must be served, `doubtful` ones may be, no other one is; whatever is served is right.

    Each action takes a number that picks the chunk and the kind of fault. With `disk_bytes` the store may evict sure
    chunks; they are sure no longer then.
    """

    def __init__(self, root: Path, samples: list[Any], shape: Any, make_io: Callable[[], Any], files_max: int) -> None:
        self.root, self.samples, self.shape, self.make_io = root, samples, shape, make_io
        self.host_bytes = 2 * samples[0].num_bytes + 100
        file_bytes = 4096 * (1 + len(samples[0].layers))
        self.disk_bytes = files_max * file_bytes or None
        self.sure: set[int] = set()
        self.doubtful: set[int] = set()
        self.held: list[tuple[int, ChunkLease]] = []

    async def start(self) -> None:
        self.io = self.make_io()
        fingerprint = self.samples[0].key.fingerprint
        self.store = await ChunkStore.open(
            self.root,
            self.shape,
            fingerprint,
            self.host_bytes,
            self.io,
            disk_bytes_budget=self.disk_bytes,
            wait_s=0.001,
        )

    async def stop(self) -> None:
        while self.held:
            self.held.pop()[1].release()
        await self.store.close()

    def is_sure(self, number: int) -> bool:
        """Whether a chunk must be there; one that was evicted from disk need not, and must not come back."""
        if self.disk_bytes is not None and not self.store.contains(self.samples[number].key):
            self.sure.discard(number)
        return number in self.sure

    # ---- what users of a store do ----

    async def put(self, pick: int) -> None:
        number = pick % CHUNKS
        one, was_sure = self.samples[number], self.is_sure(number)
        try:
            created = await self.store.put(one.key, one.ids, one.layers, cost_s=float(pick % 7))
        except StoreWriteFailed:
            assert not was_sure
            return
        assert not (created and was_sure)
        if created:
            self.sure.add(number)
            self.doubtful.discard(number)

    async def replace(self, pick: int) -> None:
        """Store a chunk anew; where that fails, the old one must still be there."""
        number = pick % CHUNKS
        one = self.samples[number]
        with contextlib.suppress(StoreWriteFailed):
            assert await self.store.put(one.key, one.ids, one.layers, replace=True)
            self.sure.add(number)
            self.doubtful.discard(number)

    async def fill(self, pick: int) -> None:
        for number in range(CHUNKS):
            await self.put(pick + number)

    async def read(self, pick: int) -> None:
        number = pick % CHUNKS
        one = self.samples[number]
        lease = await self.store.lease(one.key, one.ids)
        try:
            if lease is None:
                assert not self.is_sure(number)
                return
            assert number in self.sure | self.doubtful
            with lease:
                await lease.prefetch(range(len(one.layers)))
                assert [bytes(await lease.layer(index)) for index in range(len(one.layers))] == one.layers
        except ChunkDamaged:
            assert not self.is_sure(number)

    async def hold(self, pick: int) -> None:
        one = self.samples[pick % CHUNKS]
        lease = await self.store.lease(one.key, one.ids)
        if lease is not None:
            self.held.append((pick % CHUNKS, lease))

    async def release(self, pick: int) -> None:
        if self.held:
            self.held.pop(pick % len(self.held))[1].release()

    async def evict(self, pick: int) -> None:
        self.store.evict_nowait(self.samples[pick % CHUNKS].key.id)

    async def delete(self, pick: int) -> None:
        number = pick % CHUNKS
        known = self.store.contains(self.samples[number].key)
        assert await self.store.delete(self.samples[number].key.id) == known
        if known:
            self.sure.discard(number)
            self.doubtful.discard(number)

    async def restart(self, pick: int) -> None:
        """Close in the middle of a read, open again; with or without its index."""
        reading = asyncio.create_task(self.read(pick))
        self.doubt(pick % CHUNKS)  # the read may find the store closed
        await asyncio.sleep(0)
        await self.stop()
        await reading
        if pick % 3 == 0:
            forget_catalog(self.root)
        await self.start()

    async def race(self, pick: int) -> None:
        """Puts, reads and a cancelled reader of one chunk at once."""
        number = pick % CHUNKS
        one, was_sure = self.samples[number], self.is_sure(number)
        lost = asyncio.create_task(self.store.lease(one.key, one.ids))
        puts = [asyncio.create_task(self.store.put(one.key, one.ids, one.layers)) for _ in range(2)]
        reads = [asyncio.create_task(self.store.lease(one.key, one.ids)) for _ in range(2)]
        await asyncio.sleep(0)
        lost.cancel()
        done = await asyncio.gather(*puts, return_exceptions=True)
        assert all(isinstance(result, bool | StoreWriteFailed) for result in done)
        assert sum(result is True for result in done) <= (not was_sure)
        for lease in [*await asyncio.gather(*reads), *await asyncio.gather(lost, return_exceptions=True)]:
            if isinstance(lease, ChunkLease):
                lease.release()
        if number not in self.sure:
            self.doubtful.add(number)

    # ---- what happens to disks ----

    def doubt(self, number: int) -> None:
        if number in self.sure:
            self.sure.discard(number)
            self.doubtful.add(number)

    async def flip(self, pick: int) -> None:
        """One bit of the chunk's file, in any part of it."""
        number, at = pick % CHUNKS, FLIPS[pick // CHUNKS % len(FLIPS)]
        path = self.samples[number].path(self.root)
        if path.exists() and (raw := bytearray(path.read_bytes())):
            raw[at % len(raw)] ^= 1 << pick % 8
            path.write_bytes(raw)
            self.doubt(number)

    async def cut(self, pick: int) -> None:
        path = self.samples[pick % CHUNKS].path(self.root)
        if path.exists():
            path.write_bytes(path.read_bytes()[: pick // CHUNKS * 1000])
            self.doubt(pick % CHUNKS)

    async def lose(self, pick: int) -> None:
        """The file is gone, by somebody else's hand."""
        self.samples[pick % CHUNKS].path(self.root).unlink(missing_ok=True)
        self.doubt(pick % CHUNKS)

    async def fail_write(self, pick: int) -> None:
        await self.failing(WRITE_STEPS, pick, self.put)

    async def fail_replace(self, pick: int) -> None:
        await self.failing(WRITE_STEPS, pick, self.replace)

    async def fail_read(self, pick: int) -> None:
        self.doubt(pick % CHUNKS)
        await self.failing(READ_STEPS, pick, self.read)

    async def failing(self, steps: tuple[str, ...], pick: int, action: Callable[[int], Awaitable[None]]) -> None:
        """Act while one step of it fails, once."""
        error = ERRORS[pick // CHUNKS % len(ERRORS)]
        self.io.fail(steps[pick % len(steps)], OSError(error, "planted"))
        await action(pick)
        self.io.heal()

    async def short_write(self, pick: int) -> None:
        """The disk says that all went well and kept less."""
        self.io.write_cut_bytes = 1 + pick
        await self.put(pick)
        self.io.write_cut_bytes = 0

    async def short_reads(self, pick: int) -> None:
        self.io.read_bytes_max = 200 + pick
        self.store.evict_nowait(self.samples[pick % CHUNKS].key.id)
        await self.read(pick)
        self.io.read_bytes_max = None

    async def wrong_reads(self, pick: int) -> None:
        """Bits flip on the way from the disk."""
        self.store.evict_nowait(self.samples[pick % CHUNKS].key.id)
        self.doubt(pick % CHUNKS)
        self.io.flip_reads = True
        await self.read(pick)
        self.io.flip_reads = False

    async def hang_read(self, pick: int) -> None:
        """While reads of a chunk hang, others are written, and a second and a cancelled reader of it wait like the
        first; none of them for ever.
        """
        self.store.evict_nowait(self.samples[pick % CHUNKS].key.id)
        step = READ_STEPS[pick % 2]
        readers = await self.hanging(step, [self.read, self.read], pick)
        lost = asyncio.create_task(self.store.lease(self.samples[pick % CHUNKS].key, self.samples[pick % CHUNKS].ids))
        await asyncio.sleep(0)
        lost.cancel()
        await self.put(pick + 1)
        self.io.open_gate(step)
        await asyncio.gather(*readers)
        for lease in await asyncio.gather(lost, return_exceptions=True):
            if isinstance(lease, ChunkLease):
                lease.release()

    async def hang_write(self, pick: int) -> None:
        """While a chunk's write hangs, it is a miss or served right, at once, and so are others."""
        step = WRITE_STEPS[1 + pick % 3]
        writers = await self.hanging(step, [self.put], pick)
        await self.read(pick)
        await self.read(pick + 1)
        self.io.open_gate(step)
        await asyncio.gather(*writers)

    async def hanging(
        self, step: str, actions: list[Callable[[int], Awaitable[None]]], pick: int
    ) -> list[asyncio.Task[None]]:
        """Start actions that hang in one step of theirs; returns when one does, or all were done without it."""

        async def act(action: Callable[[int], Awaitable[None]]) -> None:
            await action(pick)

        self.io.arrived.clear()
        self.io.gate(step)
        tasks = [asyncio.create_task(act(action)) for action in actions]
        arrived = asyncio.create_task(self.io.arrived[step].acquire())
        await asyncio.wait({arrived, asyncio.gather(*tasks)}, return_when=asyncio.FIRST_COMPLETED)
        arrived.cancel()
        return tasks

    # ---- what holds after every step ----

    def check(self) -> None:
        self.store._pool.validate()
        stats = self.store.stats()
        assert stats.leases == len(self.held)
        assert stats.pinned_bytes == 0 or self.held
        assert stats.host_bytes <= self.host_bytes or stats.host_bytes == stats.pinned_bytes
        assert self.disk_bytes is None or stats.disk_bytes <= self.disk_bytes
        for number in range(CHUNKS):
            known = self.store.contains(self.samples[number].key)
            assert known or not self.is_sure(number)
            assert not known or number in self.sure | self.doubtful
        for number, lease in self.held:
            for index, layer in enumerate(self.samples[number].layers):
                ready = lease.layer_nowait(index)
                assert ready is None or bytes(ready) == layer
