"""Random sequences of everything a store can live through; what is served is right, and the books balance."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.errors import ChunkDamaged, StoreWriteFailed
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from kvblend.store.format import KVShape
    from tests.store.conftest import FaultyIO, Make, Sample

CHUNKS = 4
ACTIONS = (
    "put", "put", "read", "read", "hold", "release", "evict", "delete", "flip", "cut", "fail_write", "fail_read",
    "race", "restart",
)  # fmt: skip


class Life:
    """A store beside a model of it: `sure` chunks must be served, `doubtful` ones may be, no other one is."""

    def __init__(self, root: Path, samples: list[Sample], shape: KVShape, make_io: type[FaultyIO]) -> None:
        self.root, self.samples, self.shape, self.make_io = root, samples, shape, make_io
        self.sure: set[int] = set()
        self.doubtful: set[int] = set()
        self.held: list[tuple[int, ChunkLease]] = []

    async def start(self) -> None:
        self.io = self.make_io()
        budget = 2 * self.samples[0].num_bytes + 100
        one = self.samples[0]
        self.store = await ChunkStore.open(self.root, self.shape, one.key.fingerprint, budget, self.io)

    async def stop(self) -> None:
        self.release_all()
        await self.store.close()

    def release_all(self) -> None:
        while self.held:
            self.held.pop()[1].release()

    async def put(self, number: int) -> None:
        one = self.samples[number]
        try:
            created = await self.store.put(one.key, one.ids, one.layers)
        except StoreWriteFailed:
            assert number not in self.sure
            return
        assert not (created and number in self.sure)
        if created:
            self.sure.add(number)
            self.doubtful.discard(number)

    async def read(self, number: int) -> None:
        one = self.samples[number]
        lease = await self.store.lease(one.key, one.ids)
        try:
            if lease is None:
                assert number not in self.sure
                return
            assert number in self.sure | self.doubtful
            with lease:
                await lease.prefetch(range(len(one.layers)))
                assert [bytes(await lease.layer(index)) for index in range(len(one.layers))] == one.layers
        except ChunkDamaged:
            assert number not in self.sure

    async def hold(self, number: int) -> None:
        one = self.samples[number]
        lease = await self.store.lease(one.key, one.ids)
        if lease is not None:
            self.held.append((number, lease))

    async def release(self, number: int) -> None:
        if self.held:
            self.held.pop(number % len(self.held))[1].release()

    async def evict(self, number: int) -> None:
        self.store.evict_nowait(self.samples[number].key.id)

    async def delete(self, number: int) -> None:
        known = self.store.contains(self.samples[number].key)
        assert await self.store.delete(self.samples[number].key.id) == known
        if known:
            self.sure.discard(number)
            self.doubtful.discard(number)

    def doubt(self, number: int) -> None:
        if number in self.sure:
            self.sure.discard(number)
            self.doubtful.add(number)

    async def flip(self, number: int) -> None:
        path = self.samples[number].path(self.root)
        if path.exists():
            raw = bytearray(path.read_bytes())
            if raw:
                raw[(number * 5417) % len(raw)] ^= 4
            path.write_bytes(raw)
            self.doubt(number)

    async def cut(self, number: int) -> None:
        path = self.samples[number].path(self.root)
        if path.exists():
            path.write_bytes(path.read_bytes()[: number * 4000])
            self.doubt(number)

    async def fail_write(self, number: int) -> None:
        step = ("make_folder", "write_file", "rename", "sync_folder")[number]
        self.io.fail(step, OSError(errno.ENOSPC, "No space left on device"))
        await self.put(number)
        self.io.heal()

    async def fail_read(self, number: int) -> None:
        self.io.fail(("read_heads", "read_into")[number % 2], OSError(errno.EIO, "Input/output error"))
        self.doubt(number)
        await self.read(number)
        self.io.heal()

    async def race(self, number: int) -> None:
        """Puts, reads and a cancelled reader of one chunk at once."""
        one = self.samples[number]
        lost = asyncio.create_task(self.store.lease(one.key, one.ids))
        puts = [asyncio.create_task(self.store.put(one.key, one.ids, one.layers)) for _ in range(2)]
        reads = [asyncio.create_task(self.store.lease(one.key, one.ids)) for _ in range(2)]
        await asyncio.sleep(0)
        lost.cancel()
        assert sum(await asyncio.gather(*puts)) <= (number not in self.sure)
        for lease in [*await asyncio.gather(*reads), *await asyncio.gather(lost, return_exceptions=True)]:
            if isinstance(lease, ChunkLease):
                lease.release()
        if number not in self.sure:
            self.doubtful.add(number)

    async def restart(self, number: int) -> None:
        await self.stop()
        await self.start()

    def check(self) -> None:
        self.store._pool.validate()
        stats = self.store.stats()
        assert stats.leases == len(self.held)
        assert stats.pinned_bytes == 0 or self.held
        for number in range(CHUNKS):
            known = self.store.contains(self.samples[number].key)
            assert known or number not in self.sure
            assert not known or number in self.sure | self.doubtful
        for number, lease in self.held:
            for index, layer in enumerate(self.samples[number].layers):
                ready = lease.layer_nowait(index)
                assert ready is None or bytes(ready) == layer


steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, CHUNKS - 1)), max_size=30)


async def live(life: Life, steps: list[tuple[str, int]]) -> None:
    await life.start()
    try:
        for action, number in steps:
            await getattr(life, action)(number)
            life.check()
    finally:
        await life.stop()
    assert life.store.stats().pinned_bytes == 0


@given(steps)
def test_whatever_happens_what_is_served_is_right(
    sample: Make, shape: KVShape, new_io: type[FaultyIO], steps: list[tuple[str, int]]
) -> None:
    samples = [sample(number) for number in range(CHUNKS)]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Life(Path(folder), samples, shape, new_io), steps))
