"""Stores chunk after chunk and prints the number of each one that is durable; killed by the test that started it.

Usage: crash_writer.py ROOT FIRST_NUMBER
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


def make_chunk(number: int) -> tuple[ChunkKey, tuple[int, ...], list[bytearray]]:
    """The chunk of a number: key, token ids and layers."""
    source = random.Random(number)
    ids = tuple(source.randrange(1 << 32) for _ in range(source.randrange(1, 300)))
    layers = [bytearray(source.randbytes(SHAPE.layer_bytes(len(ids)))) for _ in range(SHAPE.num_layers)]
    return ChunkKey.of(FINGERPRINT, "", (), ids), ids, layers


async def write_for_ever(store: ChunkStore, number: int) -> None:
    while True:
        await store.put(*make_chunk(number))
        print(number, flush=True)
        number += WRITERS


async def main(root: Path, first: int) -> None:
    store = await ChunkStore.open(root, SHAPE, FINGERPRINT, 1 << 20)
    await asyncio.gather(*(write_for_ever(store, first + index) for index in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
