"""What a store holds, chunk by chunk, for whoever wants to see it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection
from dataclasses import dataclass

from kvblend.store.index import ChunkIndex
from kvblend.store.keys import tag_of, tenant_of
from kvblend.store.pool import HostPool, PoolEntry


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """A chunk's public id, its length in tokens, and its bytes: of its file, or in memory where it has none."""

    id: str
    num_tokens: int
    num_bytes: int


async def list_page(
    index: ChunkIndex, pool: HostPool, after: bytes, limit: int, salt: str | None = None
) -> list[ListedChunk]:
    """At most `limit` chunks on disk or in memory, in the order of their digests, from behind `after` on.

    With `salt`, those of this tenant only.
    """
    if salt is None:
        digests = {*index.rows, *pool.digests()}
    else:
        tenant, rows = tenant_of(salt), list(index.rows.items())
        tag = tag_of(tenant)
        in_memory = [
            one for one in pool.digests() if (entry := pool.get(one)) is not None and entry.key.tenant == tenant
        ]
        digests = await asyncio.to_thread(lambda: {*(one for one, row in rows if row.tenant == tag), *in_memory})
    # among 100,000 that takes long enough to be felt by others
    chosen = await asyncio.to_thread(first_behind, digests, after, limit)
    found = (describe(digest, index, pool.get(digest)) for digest in chosen)
    return [chunk for chunk in found if chunk is not None]


def first_behind(digests: Collection[bytes], after: bytes, limit: int) -> list[bytes]:
    """The `limit` smallest digests above `after`, ascending."""
    return heapq.nsmallest(limit, (digest for digest in digests if digest > after))


def describe(digest: bytes, index: ChunkIndex, entry: PoolEntry | None) -> ListedChunk | None:
    """What is known of one chunk; None where neither the index nor the pool has it any more."""
    row = index.get(digest)
    if row is not None:
        return ListedChunk(digest.hex(), row.num_tokens, row.file_bytes)
    if entry is None:
        return None
    sizes = (layer.nbytes for layer in entry.layers if layer is not None)
    return ListedChunk(digest.hex(), entry.num_tokens, entry.data.nbytes if entry.data is not None else sum(sizes))
