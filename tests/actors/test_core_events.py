"""The messages between actors: frozen, and slots counted right."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from core_driver import A, generate, store

from kvblend.actors.core import events as ev

ALL: set[type] = {*get_args(ev.SchedulerEvent), *get_args(ev.SchedulerCommand), ev.Job, ev.Hit, ev.SegmentKeys}


def test_an_answer_needs_slots_for_its_output_too() -> None:
    assert generate("r", A, max_tokens=5).tokens_max == 3 + 4 + 2 + 5


def test_a_document_needs_slots_for_its_prompt_only() -> None:
    assert store("s", A).tokens_max == 3 + 4


@pytest.mark.parametrize("kind", sorted(ALL, key=str))
def test_messages_are_frozen(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
