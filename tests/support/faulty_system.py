"""A small system on a disk that fails or hangs when told to, and what must be left of it in the end: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from shell_rig import GatedDisk
from small_system import SETTINGS, TEXTS, answer

from kvblend.actors.errors import RequestError
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.settings import Settings
from kvblend.actors.streams import TokenStream
from kvblend.actors.system import System
from kvblend.engine.assembly import assemble_engine
from kvblend.store.format import KVShape
from kvblend.store.store import ChunkStore

SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])
NONSENSE: Any = "a message nobody knows"


@asynccontextmanager
async def running_on(disk: GatedDisk, model: Path, root: Path, **changes: Any) -> AsyncIterator[System]:
    """A system whose store lies on this disk."""
    settings = Settings(**{**SETTINGS, **changes})
    device = DeviceThread(capacity=256)
    await device.start()
    engine = await device.submit(assemble_engine, model, "float32", "cpu", "sdpa", settings.kv_tokens_max, 0)
    config = engine.config
    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, engine.dtype)
    store = await ChunkStore.open(root, shape, engine.fingerprint, settings.host_bytes_budget, disk)
    system = System(settings, "tiny", engine, device, store)
    try:
        yield system
    finally:
        disk.reads.set()
        disk.writes.set()
        await system.close()


async def store_all(system: System, root: Path) -> None:
    """Store all texts and the system prompt, on disk only."""
    await answer(system, "warm", TEXTS, "", generate=False)
    await system.settle()
    assert all(system._store.evict_nowait(chunk_id) for chunk_id in stored_ids(root))


def stored_ids(root: Path) -> list[str]:
    """The ids of all chunks on disk."""
    return [path.stem for path in root.rglob("*.kvc")]


async def until(condition: Callable[[], bool]) -> None:
    """Let everybody run until it holds."""
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110  (what is waited for sets no event)
            await asyncio.sleep(0.001)


async def until_quiet(system: System) -> None:
    """Wait until every lease, slot and captured chunk is given back, and check that they are."""
    await system.settle()
    pool = system._engine.runner.pool
    # frees go to the device with its next job: the slots are back a turn of the loop after it looks idle
    await until(lambda: not (system.store_stats().leases or system._device.depth or pool.tokens_used))
    details = system.ready().details
    assert (details["jobs"], details["requests"], details["kv_tokens_used"]) == (0, 0, 0)
    assert (system._troupe._tables.captured, system._troupe._tables.layers) == ({}, {})


async def failure(stream: TokenStream) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await stream.result()
    return caught.value
