"""The loading controller in the whole system: what it decides is done, right, and said in the figures."""

from __future__ import annotations

import time
from pathlib import Path

from small_system import TEXTS, answer, running

from kvblend.actors.core.speeds import TierSpeed
from kvblend.actors.system import System

SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])


def make_cold_and_slow(system: System, folder: Path) -> None:
    """Nothing is left in memory, and the controller believes that the disk is very slow."""
    for path in folder.rglob("*.kvc"):
        assert system.evict_host_nowait(path.stem)
    controller = system._troupe._state.controller
    controller.compute.note(1000.0, 1.0, blend=True)
    controller.speeds["disk"] = TierSpeed(1000.0, 0.0, time.monotonic())


async def test_chunks_of_a_slow_tier_are_computed_and_the_answer_is_that_of_a_full_prefill(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=16)
        await answer(system, "a", TEXTS)
        await answer(system, "w", SHUFFLED)
        await system.settle()
        make_cold_and_slow(system, tmp_path / "s")
        stored = system.store_stats().chunks
        text, end = await answer(system, "b", SHUFFLED, max_tokens=16)
        await system.settle()
        assert system.store_stats().chunks == stored
    assert text == full
    assert end.usage.loading.chunks_computed == 4
    assert end.usage.chunk_hits == 4
    assert end.usage.tokens_recomputed == 0
    assert end.usage.notes[-1] == "4 stored segments were computed: that is faster than loading them"


async def test_a_ratio_that_loading_hides_is_raised_and_said(tiny_model_path: Path, tmp_path: Path) -> None:
    settings = {"recompute_ratio": "auto", "auto_ratio_floor": 0.1, "slow_loads": "load"}
    async with running(tiny_model_path, store=tmp_path / "s", **settings) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=16)
        await answer(system, "a", TEXTS)
        await answer(system, "w", SHUFFLED)
        await system.settle()
        make_cold_and_slow(system, tmp_path / "s")
        text, end = await answer(system, "b", SHUFFLED, max_tokens=16)
        _, given = await answer(system, "c", SHUFFLED, recompute_ratio=0.5)
    # every cached row is computed: that is a full prefill
    assert text == full
    assert end.usage.recompute_ratio == 1.0
    assert (end.usage.loading.ratio_auto, end.usage.loading.ratio_floor) == (True, 0.1)
    assert end.usage.loading.load_ms > end.usage.loading.compute_ms > 0.0
    assert (given.usage.recompute_ratio, given.usage.loading.ratio_auto) == (0.5, False)
