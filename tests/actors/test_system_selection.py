"""Selections through the whole system: refused at the start, and exact where they choose everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_system import TEXTS, answer, request, running

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions, SelectionOptions
from kvblend.actors.settings import Settings
from kvblend.actors.system import System

SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])


@pytest.mark.parametrize("name", ["check_layers", "score_layers"])
async def test_layers_the_model_does_not_have_are_refused_at_the_start(tiny_model_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=rf"{name} is \(1, 99\); the model has layers") as caught:
        await System.start(Settings(**{name: (1, 99)}), tiny_model_path, "tiny")  # type: ignore[arg-type]
    assert caught.value.param == name


async def test_a_threshold_of_zero_gives_the_text_of_full_prefill(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full")
        await answer(system, "a", TEXTS)
        await system.settle()
        blend = BlendOptions(selection=SelectionOptions(thresholds=(0.0,)))
        text, end = await (await system.submit(replace(request("b", SHUFFLED), blend=blend))).result()
    assert (text, end.usage.charged_ratio) == (full, 1.0)
