"""The blender on a tiny model: one step at a time, slots freed behind it, layers that come late."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from core_driver import A, generate, store
from shell_rig import Rig, open_rig
from tiny_models import CPU, tiny_config, tiny_model

from kvblend.actors.blender import Blender
from kvblend.actors.core import events as ev
from kvblend.actors.core.planning import decide
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.signals import LayerLoaded, Reset
from kvblend.actors.tables import RequestLayers, SideTables
from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan
from kvblend.engine.output import OutputText
from kvblend.engine.runner import Runner, SequenceSpec, TickResult
from kvblend.engine.selectors.plain import PlainSelector

MODEL = tiny_model(tiny_config(num_layers=3), dtype=torch.float32)
BIG = 1000


class Numbers:
    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


class Specs:
    """Like SpecBuilder, without a tokenizer."""

    def build(self, job: ev.Job, plan: BlendPlan, captures: tuple[int, ...], source: RequestLayers) -> SequenceSpec:
        output = OutputText(Numbers(), (), (), job.sampling.max_tokens) if job.kind == "generate" else None
        return SequenceSpec(job.request_id, plan, PlainSelector(), job.tokens_max, source, captures, None, output)


@dataclass
class World:
    rig: Rig
    runner: Runner
    device: DeviceThread
    tables: SideTables

    def start(self, job: ev.Job, *hits: ev.Hit) -> None:
        decision = decide(job, hits, 0)
        self.rig.tell(ev.StartSequence(job, decision.plan, decision.captures))

    def step(self, number: int, *names: str) -> None:
        self.rig.tell(ev.RunStep(number, tuple(ev.StepItem(name, BIG) for name in names)))

    async def done(self) -> ev.StepDone:
        told = await self.rig.heard()
        assert isinstance(told, ev.StepDone)
        return told

    async def until_free(self) -> None:
        await self.rig.until(lambda: self.runner.pool.tokens_used == 0 and self.device.depth == 0)

    def hold_device(self) -> threading.Event:
        """Keep the device busy until the event is set."""
        gate = threading.Event()
        self.device.submit(gate.wait, 10.0)
        return gate

    def layer(self, name: str, layer: int, tokens: int) -> None:
        """Do as the loader does when a layer of the system prompt is there."""
        self.tables.open_layers(name).put(layer, layer_parts(tokens))
        self.rig.tell(LayerLoaded(name, layer))


def layer_parts(tokens: int) -> list[tuple[int, memoryview]]:
    config = MODEL.config
    return [(0, memoryview(bytearray(2 * config.num_kv_heads * tokens * config.head_dim * 4)))]


@asynccontextmanager
async def world(tokens_max: int = 512) -> AsyncIterator[World]:
    device, tables = DeviceThread(), SideTables()
    runner = Runner(MODEL, SdpaBackend(), SlabPool(MODEL.config, tokens_max, MODEL.dtype, CPU))
    await device.start()
    specs: Any = Specs()
    try:
        async with open_rig() as rig:
            rig.run(lambda: Blender(runner, device, specs, tables, rig.scheduler))
            yield World(rig, runner, device, tables)
    finally:
        await device.close()


async def test_a_step_tells_its_number_and_what_it_did() -> None:
    async with world() as w:
        w.start(generate("r", A))
        w.step(7, "r")
        told = await w.done()
        (result,) = told.results
        assert (told.number, result.status, result.request_id) == (7, "sampled", "r")
        assert result.sampled is not None
        assert result.sampled.text == f"{result.sampled.token_id} "
        assert result.prefill is not None
        assert result.prefill.tokens_fresh == 9


async def test_captured_segments_lie_in_the_side_table_when_the_step_is_told() -> None:
    async with world() as w:
        w.start(store("s", A))
        w.step(1, "s")
        assert (await w.done()).results[0].status == "prefilled"
        assert set(w.tables.captured) == {("s", 0), ("s", 1)}
        assert [len(layer) for layer in w.tables.captured["s", 1]] == [2 * 2 * len(A) * 8 * 4] * 3


async def test_slots_are_freed_behind_the_step_that_uses_them() -> None:
    async with world() as w:
        w.start(generate("r", A))
        gate = w.hold_device()
        w.step(1, "r")
        w.rig.tell(ev.FreeSequence("r"), ev.FreeSequence("r"))
        await w.rig.until(lambda: w.device.depth == 3)
        gate.set()
        assert (await w.done()).results[0].status == "sampled"
        await w.until_free()


async def test_what_a_freed_sequence_captured_is_dropped() -> None:
    async with world() as w:
        gate = w.hold_device()
        w.start(store("s", A))
        w.step(1, "s")
        await w.rig.until(lambda: "s" in w.tables.layers)
        w.rig.tell(ev.FreeSequence("s"))
        await w.rig.until(lambda: "s" not in w.tables.layers)
        gate.set()
        await w.done()
        assert w.tables.captured == {}


async def test_the_layers_of_a_freed_sequence_are_closed_though_their_release_came_first() -> None:
    async with world() as w:
        w.start(generate("r", A))
        w.rig.tell(ev.FreeSequence("r"))
        w.step(1, "nobody")
        await w.done()
        assert w.tables.layers == {}


async def test_the_layers_of_the_next_try_are_left_alone_when_the_first_is_freed() -> None:
    async with world() as w:
        w.start(generate("r", A))
        await w.rig.until(lambda: "r" in w.runner.request_ids)
        w.tables.close_layers("r")
        following = w.tables.open_layers("r")
        w.rig.tell(ev.FreeSequence("r"))
        await w.until_free()
        assert w.tables.layers == {"r": following}


async def test_freed_slots_are_there_for_the_next_sequence() -> None:
    async with world(tokens_max=16) as w:
        for number, name in enumerate(("a", "b", "c")):
            w.start(generate(name, A))
            w.step(number, name)
            w.rig.tell(ev.FreeSequence(name))
            assert len((await w.done()).results) == 1


async def test_many_starts_and_frees_behind_a_step_take_few_jobs() -> None:
    async with world(tokens_max=16) as w:
        gate = w.hold_device()
        for number in range(30):
            w.start(generate(f"r{number}", A))
            w.rig.tell(ev.FreeSequence(f"r{number}"))
        w.start(generate("last", A))
        await w.rig.until(lambda: list(w.tables.layers) == ["last"])
        assert w.device.depth <= 2
        gate.set()
        w.step(1, "last")
        assert (await w.done()).results[0].status == "sampled"


async def test_a_flag_makes_the_step_leave_the_sequence() -> None:
    async with world() as w:
        w.start(generate("r", A))
        await w.rig.until(lambda: "r" in w.runner.request_ids)
        gate = w.hold_device()
        w.step(1, "r")
        w.rig.tell(ev.FlagCancelled("r"))
        await w.rig.until(lambda: w.runner._running["r"].state.cancelled)
        gate.set()
        assert (await w.done()).results[0].status == "cancelled"


async def test_the_first_layer_is_told_at_once() -> None:
    async with world() as w:
        w.start(generate("r", A), ev.Hit(0, True, "host"))
        w.layer("r", 0, 3)
        assert isinstance(await w.rig.heard(), ev.FirstLayerLoaded)


async def test_a_stalled_sequence_is_told_of_when_its_layer_comes() -> None:
    async with world() as w:
        w.start(generate("r", A), ev.Hit(0, True, "host"))
        w.layer("r", 0, 3)
        await w.rig.heard()
        w.step(1, "r")
        assert (await w.done()).results[0].status == "stalled"
        w.layer("r", 2, 3)
        w.layer("r", 1, 3)
        assert isinstance(await w.rig.heard(), ev.Unstalled)
        w.step(2, "r")
        assert (await w.done()).results[0].status == "sampled"


async def test_a_layer_that_comes_before_the_stall_is_told_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        w.start(generate("r", A), ev.Hit(0, True, "host"))
        w.layer("r", 0, 3)
        await w.rig.heard()
        real = w.runner.tick

        def tick(items: Sequence[tuple[str, int, int | None]]) -> list[TickResult]:
            results = real(items)
            assert [(result.status, result.layer) for result in results] == [("stalled", 1)]
            w.tables.layers["r"].put(1, layer_parts(3))
            return results

        monkeypatch.setattr(w.runner, "tick", tick)
        w.step(1, "r")
        assert (await w.done()).results[0].status == "running"


async def test_a_step_goes_as_far_as_it_may() -> None:
    async with world() as w:
        w.start(generate("r", A))
        w.rig.tell(ev.RunStep(1, (ev.StepItem("r", 4, 2),)))
        assert (await w.done()).results == (ev.ItemResult("r", "running", 4, row_layers=8),)


async def test_a_step_of_strangers_tells_nothing_of_them() -> None:
    async with world() as w:
        w.step(1, "nobody")
        assert (await w.done()).results == ()


async def test_a_reset_frees_every_sequence_and_what_it_captured() -> None:
    async with world() as w:
        w.start(store("s", A))
        w.start(generate("r", A))
        w.step(1, "s")
        await w.done()
        w.rig.tell(Reset())
        await w.until_free()
        assert w.tables.captured == {}


async def test_a_start_that_fails_is_a_crash_that_frees_everything() -> None:
    async with world(tokens_max=32) as w:
        w.start(generate("a", A))
        w.start(generate("b", A, max_tokens=20))
        await w.rig.crashes.get()
        await w.until_free()
        w.start(generate("c", A))
        w.step(1, "c")
        assert (await w.done()).results[0].status == "sampled"


async def test_a_crash_during_a_step_frees_the_slots_behind_it_and_tells_nothing_of_it() -> None:
    async with world() as w:
        w.start(store("s", A))
        await w.rig.until(lambda: "s" in w.runner.request_ids)
        gate = w.hold_device()
        w.step(1, "s")
        w.rig.tell("nonsense")
        await w.rig.crashes.get()
        gate.set()
        await w.until_free()
        assert (w.rig.mail.depth, w.tables.captured) == (0, {})


async def test_a_scheduler_that_is_not_there_harms_nobody() -> None:
    async with world() as w:
        w.rig.mail.close()
        w.start(generate("r", A))
        w.step(1, "r")
        await w.rig.until(lambda: w.device.depth == 0 and w.runner.pool.tokens_used > 0)
        w.rig.tell(ev.FreeSequence("r"))
        await w.until_free()
        assert w.rig.crashes.empty()
