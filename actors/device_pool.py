"""The device pool: stored chunks in device memory under a byte budget, so that hot ones are not copied there again.

Book-keeping on the loop; the bytes lie in blocks that the device thread fills (`engine.payloads`). It has whole chunks
in their stored form, as the store gave them, and none that the store has no longer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.actors.tables import LayerPart
from kvblend.engine.assembly import Engine
from kvblend.engine.payloads import DeviceBlock, block_bytes, free_memory_bytes
from kvblend.store.eviction import make_policy
from kvblend.store.keys import ChunkKey
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

log = logging.getLogger("kvblend.device_pool")
TIER = "device_pool"
COPY_S_PER_BYTE = 1e-10
"""About what a copy from host memory takes: only its being the same for all matters."""
NewBlock = Callable[[int, int], DeviceBlock]
"""Makes a block for so many layers of so many bytes."""


class LayerLease(Protocol):
    """Access to one chunk's layers until `release`, wherever they lie. What is used after that may be anything."""

    @property
    def key(self) -> ChunkKey:
        """The chunk's key."""

    @property
    def layer_bytes(self) -> int:
        """The length of each of its layers."""

    @property
    def tier(self) -> str:
        """Where the chunk was when it was leased."""

    def layer_nowait(self, index: int) -> LayerPart | None:
        """A layer for the device thread; None where it must be read first."""

    @property
    def stored(self) -> ChunkLease | None:
        """What layers that are not there are read through; None where all are on the device."""

    def release(self) -> None:
        """Give the lease back. A second call does nothing."""


@dataclass(slots=True, eq=False)
class Resident:
    """A chunk in the pool, or on its way there. `pins` counts its leases."""

    key: ChunkKey
    block: DeviceBlock
    pins: int = 0


@dataclass(frozen=True, slots=True)
class DevicePoolStats:
    """A moment's state and the counts since the start.

    `hits` are look-ups that needed no other tier, `fills` chunks taken in, `skipped` those that found no room:
    what is there was in use, or they are larger than the budget. `num_bytes` counts chunks that are on their way here,
    and deleted ones that are still in use.
    """

    chunks: int
    num_bytes: int
    bytes_budget: int
    pinned_bytes: int
    hits: int
    fills: int
    evictions: int
    skipped: int


class DeviceLease:
    """A chunk's layers on the device. Those that are not there yet come from `host` and are copied there on the way."""

    __slots__ = ("_host", "_pool", "_released", "_resident")

    def __init__(self, pool: DevicePool, resident: Resident, host: ChunkLease | None = None) -> None:
        """`resident` is pinned for this lease. Without `host` all of its layers are there."""
        self._pool = pool
        self._resident = resident
        self._host = host
        self._released = False

    @property
    def key(self) -> ChunkKey:
        """The chunk's key."""
        return self._resident.key

    @property
    def layer_bytes(self) -> int:
        """The length of each of its layers."""
        return self._resident.block.layer_bytes

    @property
    def tier(self) -> str:
        """Where the chunk was when it was leased."""
        return TIER if self._host is None else self._host.tier

    def layer_nowait(self, index: int) -> LayerPart | None:
        """The layer on the device, for the device thread to ask for; None where it must be read first."""
        block = self._resident.block
        if self._host is None or block.has(index):
            return functools.partial(block.layer, index)
        view = self._host.layer_nowait(index)
        return None if view is None else functools.partial(block.fill, index, view)

    @property
    def stored(self) -> ChunkLease | None:
        """What layers that are not there are read through; None where all are on the device."""
        return self._host

    def release(self) -> None:
        """Give the lease back. A second call does nothing."""
        if not self._released:
            self._released = True
            self._pool.unpin(self._resident)
            if self._host is not None:
                self._host.release()


class DevicePool:
    """Never more than `bytes_budget`: what is leased stays, and where that leaves no room a chunk is not taken in.

    All methods belong to the loop. Chunks come in while a request loads them; one copy serves all.
    """

    def __init__(self, store: ChunkStore, bytes_budget: int, new_block: NewBlock, policy: str = "lru") -> None:
        """Of chunks of `store`, in the blocks that `new_block` makes. Raises ValueError for an unknown policy."""
        self.bytes_budget = bytes_budget
        self._least_budget = bytes_budget // 2
        self._num_bytes = 0
        self._store = store
        self._new_block = new_block
        self._policy = make_policy(policy)
        self._residents: dict[bytes, Resident] = {}
        # gone from the store, and in use
        self._orphans: set[Resident] = set()
        self._hits = self._fills = self._evictions = self._skipped = 0
        store.watch_gone(self.forget)

    def lease(self, key: ChunkKey) -> DeviceLease | None:
        """A lease of a chunk that is here whole, else None. A hit is a use of the stored chunk, too."""
        resident = self._residents.get(key.digest)
        if resident is None or resident.key != key or not resident.block.is_full:
            return None
        self._hits += 1
        self._pin(resident)
        self._policy.use(key.digest)
        self._store.use_nowait(key)
        return DeviceLease(self, resident)

    def admit(self, lease: LayerLease) -> LayerLease:
        """A lease in the place of this one, whose layers are copied to the device as they are taken; `lease` itself
        where there is no room, or the chunk has left the store meanwhile.
        """
        if not isinstance(lease, ChunkLease) or not lease.is_current:
            return lease
        resident = self._residents.get(lease.key.digest) or self._take_in(lease)
        if resident is None:
            return lease
        self._pin(resident)
        return DeviceLease(self, resident, lease)

    def forget(self, digest: bytes) -> None:
        """The chunk is gone or stored anew: nobody finds it here any more, and who has leased it keeps its bytes."""
        resident = self._residents.pop(digest, None)
        if resident is None:
            return
        self._policy.discard(digest)
        if resident.pins:
            self._orphans.add(resident)
        else:
            self._drop(resident)

    def unpin(self, resident: Resident) -> None:
        """Undo one pin; after the last one the chunk may go, and one that did not get here whole does."""
        resident.pins -= 1
        if resident.pins:
            return
        digest = resident.key.digest
        if resident not in self._orphans and resident.block.is_full:
            self._policy.free(digest)
            return
        if resident in self._orphans:
            self._orphans.discard(resident)
        else:
            del self._residents[digest]
            self._policy.discard(digest)
        self._drop(resident)
        if resident.block.failed:
            self._lower_budget(resident.block.num_bytes)

    def stats(self) -> DevicePoolStats:
        """The state of this moment and the counts since the start."""
        everybody = [*self._residents.values(), *self._orphans]
        return DevicePoolStats(
            chunks=sum(resident.block.is_full for resident in self._residents.values()),
            num_bytes=self._num_bytes,
            bytes_budget=self.bytes_budget,
            pinned_bytes=sum(resident.block.num_bytes for resident in everybody if resident.pins),
            hits=self._hits,
            fills=self._fills,
            evictions=self._evictions,
            skipped=self._skipped,
        )

    def validate(self) -> None:
        """Raise RuntimeError naming the first broken rule; for tests."""
        residents = self._residents.values()
        idle = [resident for resident in residents if not resident.pins]
        rules = {
            "bytes are those of the chunks": self._num_bytes == _bytes_of([*residents, *self._orphans]),
            "the budget holds": self._num_bytes <= self.bytes_budget,
            "chunks that nobody uses are whole": all(resident.block.is_full for resident in idle),
            "the store has the chunks": all(self._store.contains(resident.key) for resident in residents),
            "the policy knows the chunks": len(self._policy) == len(self._residents),
            "idle chunks may go": self._policy.free_bytes == _bytes_of(idle),
            "orphans are in use": all(resident.pins for resident in self._orphans),
        }
        for rule, holds in rules.items():
            if not holds:
                raise RuntimeError(f"device pool: not true that {rule}")

    def _pin(self, resident: Resident) -> None:
        resident.pins += 1
        self._policy.hold(resident.key.digest)

    def _take_in(self, lease: ChunkLease) -> Resident | None:
        """Room for a chunk; None where what is in use leaves none. Nobody goes for what would not fit all the same."""
        layers, digest = self._store.shape.num_layers, lease.key.digest
        num_bytes = block_bytes(layers, lease.layer_bytes)
        if self._num_bytes - self._policy.free_bytes + num_bytes > self.bytes_budget:
            self._skipped += 1
            return None
        while self._num_bytes + num_bytes > self.bytes_budget and (victim := self._policy.pop()) is not None:
            self._evictions += 1
            self._drop(self._residents.pop(victim))
        resident = self._residents[digest] = Resident(lease.key, self._new_block(layers, lease.layer_bytes))
        self._num_bytes += num_bytes
        self._fills += 1
        # having it again takes a copy, whatever computing it took
        self._policy.add(digest, num_bytes, num_bytes * COPY_S_PER_BYTE)
        return resident

    def _drop(self, resident: Resident) -> None:
        resident.block.close()
        self._num_bytes -= resident.block.num_bytes

    def _lower_budget(self, num_bytes: int) -> None:
        """The device had no memory for a chunk of so many bytes: the pool does without them, to half of its budget.

        Less than that is no sign that the pool is too large: others took the memory for a moment.
        """
        lowered = max(self._least_budget, self.bytes_budget - num_bytes)
        if lowered < self.bytes_budget:
            log.warning("the device has no memory left: device_pool_bytes is now %d", lowered)
            self.bytes_budget = lowered


def make_device_pool(settings: Settings, engine: Engine, store: ChunkStore) -> DevicePool | None:
    """The pool that settings ask for; None for none. The model is on the device by now, its KV slots are not.

    Raises RequestError for a device without memory of its own, and for a budget that leaves no room for the KV slots.
    """
    wanted, model = settings.device_pool_bytes, engine.runner.model
    if not wanted:
        return None
    config, free = model.config, free_memory_bytes(model.device)
    slot_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    slots_bytes = settings.kv_tokens_max * slot_bytes
    if free is None or wanted > free - slots_bytes:
        has = "no memory of its own"
        if free is not None:
            has = f"{free} bytes free, of which {slots_bytes} are for kv_tokens_max {settings.kv_tokens_max}"
        text = f"device_pool_bytes is {wanted}; device {str(model.device)!r} has {has}"
        raise RequestError("invalid_request", text, "device_pool_bytes")
    return DevicePool(store, wanted, functools.partial(DeviceBlock, device=model.device), settings.device_pool_policy)


def _bytes_of(residents: list[Resident]) -> int:
    return sum(resident.block.num_bytes for resident in residents)
