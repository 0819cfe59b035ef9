"""Stores, reads and deletes chunk after chunk and prints what is done; killed by the test that started it.

Usage: crash_writer.py ROOT FIRST_NUMBER DISK_BYTES_BUDGET (0: none)

Prints `put N` when chunk N is durable, `going N` before it is deleted and `gone N` when it is.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from kvblend.store.format import KVShape
from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore

SHAPE = KVShape(num_layers=8, num_kv_heads=2, head_dim=16, dtype="float32")
FINGERPRINT = "crash"
WRITERS = 4
HOST_BYTES = 1 << 20
DELETE_EVERY = 5
REPLACE_EVERY = 2


def make_chunk(number: int) -> tuple[ChunkKey, tuple[int, ...], list[bytearray]]:
    """The chunk of a number: key, token ids and layers."""
    source = random.Random(number)
    ids = tuple(source.randrange(1 << 32) for _ in range(source.randrange(1, 300)))
    layers = [bytearray(source.randbytes(SHAPE.layer_bytes(len(ids)))) for _ in range(SHAPE.num_layers)]
    return ChunkKey.of(FINGERPRINT, "", (), ids), ids, layers


async def open_store(root: Path, disk_bytes_budget: int) -> ChunkStore:
    """The store of the test, on both sides of the crash."""
    return await ChunkStore.open(root, SHAPE, FINGERPRINT, HOST_BYTES, disk_bytes_budget=disk_bytes_budget or None)


def say(word: str, number: int) -> None:
    print(word, number, flush=True)


async def write_for_ever(store: ChunkStore, number: int) -> None:
    """Store one chunk after another, read an older one from disk, replace some by the same, delete some."""
    written: list[int] = []
    source = random.Random(number)
    while True:
        await store.put(*make_chunk(number))
        say("put", number)
        written.append(number)
        key, ids, layers = make_chunk(source.choice(written))
        store.evict_nowait(key.id)
        if (lease := await store.lease(key, ids)) is not None:
            with lease:
                await lease.prefetch(range(len(layers)))
        if len(written) % REPLACE_EVERY == 0:
            await store.put(*make_chunk(source.choice(written)), replace=True)
        if len(written) % DELETE_EVERY == 0:
            doomed = written.pop(source.randrange(len(written)))
            say("going", doomed)
            await store.delete(make_chunk(doomed)[0].id)
            say("gone", doomed)
        number += WRITERS


async def main(root: Path, first: int, disk_bytes_budget: int) -> None:
    store = await open_store(root, disk_bytes_budget)
    await asyncio.gather(*(write_for_ever(store, first + index) for index in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:4])))
