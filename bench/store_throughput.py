"""Bytes per second in and out of each tier of a chunk store, with chunks of a real size."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore, KVShape

SHAPE = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
TOKENS = 512
CHUNKS = 12
HOST_BYTES = 1 << 30
FINGERPRINT = "bench"


def ids_of(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + TOKENS))


def key_of(number: int) -> ChunkKey:
    return ChunkKey.of(FINGERPRINT, "", (), ids_of(number))


async def measure_tiers(root: Path, remote: str | None) -> list[dict[str, Any]]:
    """Rows `{"what", "tier", "mb_s", "chunk_mb"}`, MB being 10^6 bytes: the median over chunks, one at a time."""
    rows = await measure_memory()
    rows += await measure_disk(root)
    if remote is not None:
        rows += await measure_remote(remote)
    return rows


async def measure_memory() -> list[dict[str, Any]]:
    """A store without a folder: putting takes buffers over, getting hands them out; nothing is copied."""
    async with await ChunkStore.open(None, SHAPE, FINGERPRINT, HOST_BYTES) as store:
        return [await run("put", "host", put_into(store)), await run("get", "host", get_from(store))]


async def measure_disk(root: Path) -> list[dict[str, Any]]:
    """A folder: each put ends with fsync; gets read from the disk itself, then from the system's page cache."""
    async with await ChunkStore.open(root, SHAPE, FINGERPRINT, HOST_BYTES) as store:
        rows = [await run("put", "disk", put_into(store))]
        get = get_from(store)

        async def get_cold(number: int) -> None:
            store.evict_nowait(key_of(number).id)
            await get(number)

        for number in range(CHUNKS):
            drop_pages(root, number)
        rows.append(await run("get", "disk", get_cold))
        rows.append(await run("get", "disk, in the page cache", get_cold))
    return rows


async def measure_remote(url: str) -> list[dict[str, Any]]:
    """A Redis-protocol server, one connection's worth at a time."""
    from kvblend.store.remote import RemoteTier

    tier = await RemoteTier.open(url, SHAPE, FINGERPRINT)
    async with await ChunkStore.open(None, SHAPE, FINGERPRINT, HOST_BYTES, remote=tier) as store:
        rows = [await run("put", "remote", put_into(store))]
        get = get_from(store)

        async def get_cold(number: int) -> None:
            store.evict_nowait(key_of(number).id)
            await get(number)

        rows.append(await run("get", "remote", get_cold))
        for number in range(CHUNKS):
            await store.delete(key_of(number).id)
    return rows


def drop_pages(root: Path, number: int) -> None:
    """Take a chunk's file out of the page cache."""
    name = key_of(number).id
    descriptor = os.open(root / "chunks" / name[:2] / f"{name}.kvc", os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def put_into(store: ChunkStore) -> Callable[[int], Awaitable[None]]:
    # made beforehand: random bytes would take longer than storing them
    layers = {
        number: [bytearray(os.urandom(SHAPE.layer_bytes(TOKENS))) for _ in range(SHAPE.num_layers)]
        for number in range(CHUNKS)
    }

    async def put(number: int) -> None:
        await store.put(key_of(number), ids_of(number), layers[number])

    return put


def get_from(store: ChunkStore) -> Callable[[int], Awaitable[None]]:
    async def get(number: int) -> None:
        lease = await store.lease(key_of(number), ids_of(number))
        if lease is None:
            raise SystemExit(f"chunk {number} was put and is not there")
        with lease:
            await lease.prefetch(range(SHAPE.num_layers))

    return get


async def run(what: str, tier: str, act: Callable[[int], Awaitable[None]]) -> dict[str, Any]:
    """One row: the median over all chunks."""
    chunk_bytes = SHAPE.num_layers * SHAPE.layer_bytes(TOKENS)
    speeds = []
    for number in range(CHUNKS):
        start = time.perf_counter()
        await act(number)
        speeds.append(chunk_bytes / (time.perf_counter() - start) / 1e6)
    return {"what": what, "tier": tier, "mb_s": round(statistics.median(speeds), 1), "chunk_mb": chunk_bytes / 1e6}
