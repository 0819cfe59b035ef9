"""Random sequences of everything a store can live through; what is served is right, and the books balance."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from store_life import CHUNKS, Life

if TYPE_CHECKING:
    from kvblend.store.format import KVShape
    from tests.store.conftest import FaultyIO, Make

ACTIONS = (
    "put", "put", "fill", "fill", "read", "read", "hold", "release", "evict", "delete", "restart", "race", "replace",
    "fail_replace", "flip", "flip", "cut", "lose", "fail_write", "fail_read", "short_write", "short_reads",
    "wrong_reads", "hang_read", "hang_write",
)  # fmt: skip
STEP_S = 20.0
"""No step waits for ever, on whatever machine; a deadlock shows as this one's TimeoutError."""

steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), max_size=30)


async def live(life: Life, steps: list[tuple[str, int]]) -> None:
    await life.start()
    try:
        for action, pick in steps:
            async with asyncio.timeout(STEP_S):
                await getattr(life, action)(pick)
            life.check()
    finally:
        await life.stop()
    stats = life.store.stats()
    assert (stats.leases, stats.pinned_bytes) == (0, 0)


@given(steps, st.sampled_from((0, 0, 3, 2)))
def test_whatever_happens_what_is_served_is_right(
    sample: Make, shape: KVShape, new_io: type[FaultyIO], steps: list[tuple[str, int]], files_max: int
) -> None:
    samples = [sample(number) for number in range(CHUNKS)]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Life(Path(folder), samples, shape, new_io, files_max), steps))
