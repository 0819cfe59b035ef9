"""The messages between actors: frozen, and slots counted right."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from core_driver import A, generate, key_of, store

from kvblend.actors.core import events as ev

ALL: set[type] = {*get_args(ev.SchedulerEvent), *get_args(ev.SchedulerCommand), ev.Job, ev.Hit, ev.SegmentKeys}


def test_an_answer_needs_slots_for_its_output_too() -> None:
    assert generate("r", A, max_tokens=5).tokens_max == 3 + 4 + 2 + 5


def test_a_document_needs_slots_for_its_prompt_only() -> None:
    assert store("s", A).tokens_max == 3 + 4


def test_only_a_document_has_a_key_to_be_stored_under() -> None:
    assert store("s", A).stored_key == key_of(A)
    with pytest.raises(ValueError, match="r stores no chunk"):
        _ = generate("r", A).stored_key


@pytest.mark.parametrize("kind", sorted(ALL, key=str))
def test_messages_are_frozen(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
