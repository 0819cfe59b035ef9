"""The three actors together: what a crash of one means for the others, figures, the restart limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from core_driver import A, generate

from kvblend.actors.core import events as ev
from kvblend.actors.messages import Failed, Finished, Planned, StreamEvent
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.runtime.supervisor import RestartLimitExceeded
from kvblend.actors.settings import Settings
from kvblend.actors.signals import WhenIdle
from kvblend.actors.troupe import Troupe
from kvblend.engine.assembly import Engine, assemble_engine
from kvblend.store.format import KVShape
from kvblend.store.store import ChunkStore

WAIT_S = 60.0
NONSENSE: Any = "a message nobody knows"


class World:
    """A troupe on a tiny model. `hold_device` keeps the device thread busy until `gate` is set."""

    def __init__(self, engine: Engine, device: DeviceThread, store: ChunkStore, settings: Settings) -> None:
        self.device, self.engine = device, engine
        self.gate = threading.Event()
        self.emitted: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        emit, lose = self.emitted.put_nowait, self.lost.put_nowait
        self.troupe = Troupe(settings, engine, device, store, emit, lose)

    def hold_device(self) -> None:
        self.device.submit(self.gate.wait, WAIT_S)

    def submit(self, name: str = "r", max_tokens: int = 4) -> None:
        job = generate(name, A, max_tokens=max_tokens)
        self.troupe.scheduler.tell_nowait(ev.Submitted(job, time.monotonic()))

    async def next_event(self, *kinds: type[Any]) -> Any:
        while not isinstance(event := await self.emitted.get(), kinds):
            pass
        return event

    async def idle(self) -> bool:
        return await self.troupe.scheduler.ask(WhenIdle, WAIT_S)


@asynccontextmanager
async def open_world(model: Path, **changes: Any) -> AsyncIterator[World]:
    device = DeviceThread()
    await device.start()
    try:
        engine = await device.submit(assemble_engine, model, "float32", "cpu", "sdpa", 4096, 0)
        config = engine.config
        shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, engine.dtype)
        # "m" is the fingerprint in the keys of `core_driver`
        async with await ChunkStore.open(None, shape, "m", 1 << 24) as store:
            settings = Settings(**{"kv_tokens_max": 4096, "debug": True, **changes})
            world = World(engine, device, store, settings)
            try:
                yield world
            finally:
                world.gate.set()
                await world.troupe.close()
    finally:
        await device.close()


async def test_a_job_is_answered(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        world.submit()
        assert isinstance(await world.next_event(Finished, Failed), Finished)


async def test_a_crash_of_the_scheduler_loses_all_requests(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        world.troupe.scheduler.tell_nowait(NONSENSE)
        assert await world.lost.get() == "the scheduler failed and was restarted: AttributeError"


async def test_after_a_crash_of_the_scheduler_the_blender_frees_what_ran(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tiny_model_path) as world:
        freed: asyncio.Queue[str] = asyncio.Queue()
        loop, free = asyncio.get_running_loop(), world.engine.runner.free

        def noted(name: str) -> None:
            free(name)
            loop.call_soon_threadsafe(freed.put_nowait, name)

        monkeypatch.setattr(world.engine.runner, "free", noted)
        world.submit(max_tokens=2000)
        await world.next_event(object)
        world.troupe.scheduler.tell_nowait(NONSENSE)
        await world.lost.get()
        assert await freed.get() == "r"
        assert world.engine.runner.pool.tokens_used == 0


async def test_after_a_crash_of_the_scheduler_jobs_are_answered_again(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        world.hold_device()
        world.submit("r")
        await world.next_event(Planned)
        world.troupe.scheduler.tell_nowait(NONSENSE)
        await world.lost.get()
        world.gate.set()
        assert await world.idle()
        world.submit("r")
        assert isinstance(await world.next_event(Finished, Failed), Finished)


@pytest.mark.parametrize("name", ["loader", "blender"])
async def test_a_crash_of_a_peer_fails_what_it_held(tiny_model_path: Path, name: str) -> None:
    async with open_world(tiny_model_path) as world:
        world.hold_device()
        world.submit()
        if name == "blender":
            await world.next_event(Planned)
        peer = world.troupe.blender if name == "blender" else world.troupe.loader
        peer.tell_nowait(NONSENSE, "system")
        event = await world.next_event(Finished, Failed)
        assert event == Failed("r", "internal", f"the {name} failed and was restarted")


async def test_limits_are_those_of_the_settings(tiny_model_path: Path) -> None:
    values: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "blend_min_tokens": 7}
    loading: dict[str, Any] = {"lookahead_requests_max": 2, "slow_loads": "load", "recompute_ratio": 0.3}
    order: dict[str, Any] = {"itl_ms_max": 70.0, "policy": "edf", "ratio_lever_floor": 0.05}
    async with open_world(tiny_model_path, conditioning="bare", **values, **loading, **order) as world:
        limits = world.troupe._limits
        assert {name: getattr(limits, name) for name in (*values, *order)} == {**values, **order}
        assert (limits.pages, limits.page_tokens) == (256, 16)
        assert (limits.conditioning.kind, limits.conditioning.tokens_max) == ("bare", 2048)
        assert (limits.num_layers, limits.layer_token_bytes > 0) == (world.engine.config.num_layers, True)
        assert (limits.lookahead_requests_max, limits.computes_slow_loads, limits.ratio_floor) == (2, False, 0.3)


async def test_with_debug_a_broken_state_is_a_crash(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        await world.idle()
        world.troupe._state.pages_used = 3
        world.submit()
        assert "InvariantBroken" in await world.lost.get()


async def test_figures_count_jobs_and_slots(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        world.hold_device()
        world.submit()
        await world.next_event(object)
        figures = world.troupe.figures()
        assert (figures["jobs"], figures["sequences"], figures["kv_tokens_used"]) == (1, 1, 16)


async def test_figures_name_all_actors(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        actors = world.troupe.figures()["actors"]
        assert isinstance(actors, dict)
        assert set(actors) == {"scheduler", "loader", "blender"}


async def test_a_story_is_told_of_a_job(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        world.submit()
        await world.next_event(Finished)
        assert "LookedUp" in world.troupe.story("r")


async def test_a_troupe_whose_actor_keeps_crashing_is_over(tiny_model_path: Path) -> None:
    async with open_world(tiny_model_path) as world:
        for _ in range(4):
            await world.idle()
            world.troupe.scheduler.tell_nowait(NONSENSE)
            await world.lost.get()
        assert isinstance(await world.troupe.fatal, RestartLimitExceeded)
