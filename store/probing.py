"""A look at how fast the lower tiers are, on a few chunks that are there, before anybody waits for one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

from kvblend.store.disk import DiskTier
from kvblend.store.format import ChunkHeader
from kvblend.store.shelf import Shelf
from kvblend.store.tiers import LowerTier, Tier

log = logging.getLogger("kvblend.store")
CHUNKS_MAX = 16
"""How many chunks are read at most."""


class Reading(NamedTuple):
    """One chunk that was read whole: from where, seconds until its header was there, its bytes, and when (monotonic
    seconds) the reading of its layers began and ended.
    """

    tier: Tier
    latency_s: float
    num_bytes: int
    began_s: float
    ended_s: float


async def probe(shelf: Shelf, seconds_max: float) -> AsyncGenerator[Reading, None]:
    """Read chunks of the index from the disk, then from the remote tier, for at most `seconds_max` seconds each.

    Nothing is kept in memory, and nothing is concluded about a chunk that cannot be read: that tier's turn ends.
    """
    for tier, source in (("disk", shelf.disk), ("remote", shelf.remote)):
        end_s = asyncio.get_running_loop().time() + seconds_max
        for digest in list(itertools.islice(shelf.index.rows, CHUNKS_MAX)):
            if source is None:
                break
            try:
                async with asyncio.timeout_at(end_s):
                    found = await _read(source, digest)
            except Exception as error:  # whatever it is, somebody who needs a chunk will find it
                log.debug("the %s tier's speed was not learnt: %s", tier, error)
                break
            if found is None:
                break
            yield Reading("disk" if tier == "disk" else "remote", *found)


async def _read(source: DiskTier | LowerTier, digest: bytes) -> tuple[float, int, float, float] | None:
    """The fields of a `Reading` after its tier; None where the chunk is not there."""
    asked_s = time.monotonic()
    header: ChunkHeader | None
    if isinstance(source, DiskTier):
        header = await source.read_header(digest)
    else:
        header = await source.fetch_header(digest, counted=False)
    if header is None:
        return None
    data = memoryview(bytearray(header.data_bytes))
    began_s = time.monotonic()
    await source.read_layers(header, data, 0, len(header.layers))
    return began_s - asked_s, sum(span.length for span in header.layers), began_s, time.monotonic()
