"""What the settings of the scheduler do on a whole system."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from small_system import TEXTS, answer, first_delta, request, running

from kvblend.actors.errors import RequestError


@pytest.mark.parametrize("mode", ["blend", "full"])
async def test_a_prompt_cut_as_small_as_can_be_has_the_same_answer(tiny_model_path: Path, mode: str) -> None:
    async with running(tiny_model_path, itl_ms_max=0.001) as system:
        await answer(system, "store", TEXTS)
        await system.settle()
        alone, _ = await answer(system, "alone", TEXTS[::-1], mode=mode)
        stream = await system.submit(request("running", max_tokens=400))
        await first_delta(stream)
        beside, end = await answer(system, "beside", TEXTS[::-1], mode=mode)
        items = system.story("beside").count("StepDone running")
        stream.abandon()
    assert beside == alone
    assert end.reason in ("length", "stop")
    assert items > 1, "it took several steps"


async def test_a_request_that_would_be_late_is_refused_before_it_is_accepted(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, max_num_seqs=1) as system:
        await answer(system, "first", TEXTS, mode="full")
        stream = await system.submit(request("running", max_tokens=400))
        queued = [await system.submit(request(f"q{n}", TEXTS, mode="full")) for n in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"deadline_ms is 0\.01; the first token is expected in") as caught:
            await system.submit(request("late", TEXTS, mode="full", deadline_ms=0.01))
        for one in (stream, *queued):
            one.abandon()
    assert (caught.value.code, caught.value.status, caught.value.param) == ("overloaded", 503, "deadline_ms")
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0


async def test_the_lever_shows_in_the_figures_where_it_is_on(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, ratio_lever_floor=0.05) as system:
        assert system.figures()["engine"]["ratio_lever"] == 0.0
    async with running(tiny_model_path) as system:
        assert "ratio_lever" not in system.figures()["engine"]
