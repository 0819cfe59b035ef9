"""Messages that no pure core sees."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from kvblend.actors.core import events as ev
from kvblend.actors.signals import BlenderMessage, LayerLoaded, LoaderMessage, Reset, SchedulerMessage, WhenIdle


@pytest.mark.parametrize("kind", [LayerLoaded, Reset, WhenIdle])
def test_signals_are_frozen(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_every_command_has_an_actor_that_takes_it() -> None:
    taken = {*get_args(LoaderMessage), *get_args(BlenderMessage)}
    assert set(get_args(ev.SchedulerCommand)) - {ev.Emit} <= taken
    assert set(get_args(ev.SchedulerEvent)) <= set(get_args(SchedulerMessage))


def test_both_peers_can_be_reset() -> None:
    assert Reset in get_args(LoaderMessage)
    assert Reset in get_args(BlenderMessage)
