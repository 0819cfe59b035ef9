"""A device pool on a pretended device above a store that has some chunks, and requests that use them."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from core_driver import key_of
from shell_rig import SHAPE, payloads

from kvblend.actors.device_pool import DevicePool, LayerLease
from kvblend.engine.payloads import DeviceBlock, block_bytes
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore

new_block = functools.partial(DeviceBlock, device=torch.device("cpu"))
CHUNKS = [(n, n + 1, n + 2, n + 3) for n in range(0, 60, 10)]
A, B, C, *_ = CHUNKS
ONE = block_bytes(SHAPE.num_layers, SHAPE.layer_bytes(4))
WANTED = [bytes(layer) for layer in payloads(4)]


@asynccontextmanager
async def pool_of(
    chunks: int, policy: str = "lru", folder: Path | None = None, host_bytes: int = 1 << 20
) -> AsyncIterator[tuple[DevicePool, ChunkStore]]:
    """A pool with room for so many chunks above a store that has all of `CHUNKS`."""
    async with await ChunkStore.open(folder, SHAPE, "m", host_bytes) as store:
        for ids in CHUNKS:
            await store.put(key_of(ids), ids, payloads(4))
        yield DevicePool(store, chunks * ONE, new_block, policy), store


async def lease(pool: DevicePool, store: ChunkStore, ids: tuple[int, ...], key: ChunkKey | None = None) -> LayerLease:
    """What a request that uses the chunk holds."""
    found = pool.lease(key or key_of(ids))
    if found is not None:
        return found
    stored = await store.lease(key or key_of(ids), ids)
    assert stored is not None
    await stored.prefetch(range(SHAPE.num_layers))
    return pool.admit(stored)


def take(held: LayerLease, layer: int) -> Any:
    """A layer as the device thread takes it."""
    part = held.layer_nowait(layer)
    assert part is not None
    return part() if callable(part) else part


def read(held: LayerLease) -> list[bytes]:
    layers = [take(held, layer) for layer in range(SHAPE.num_layers)]
    return [bytes(layer.tolist()) for layer in layers]


async def use(pool: DevicePool, store: ChunkStore, *chunks: tuple[int, ...]) -> list[str]:
    """Load chunks one after another, right and to the end; the tiers they came from."""
    tiers = []
    for ids in chunks:
        held = await lease(pool, store, ids)
        assert read(held) == WANTED
        tiers.append(held.tier)
        held.release()
        pool.validate()
    return tiers
