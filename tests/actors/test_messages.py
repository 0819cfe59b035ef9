from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from kvblend.actors import messages
from kvblend.actors.messages import MODES, TERMINAL, Failed, Finished, Mode, StreamEvent

TYPES = [kind for kind in vars(messages).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_and_have_no_dictionary(kind: type) -> None:
    assert vars(kind)["__dataclass_params__"].frozen
    assert "__dict__" not in vars(kind)


@pytest.mark.parametrize("kind", get_args(StreamEvent), ids=lambda kind: kind.__name__)
def test_every_event_says_whose_it_is(kind: type) -> None:
    assert "request_id" in {field.name for field in dataclasses.fields(kind)}


def test_the_terminal_events_are_events() -> None:
    assert set(TERMINAL) == {Finished, Failed} <= set(get_args(StreamEvent))


def test_modes_are_those_of_the_type() -> None:
    assert get_args(Mode) == MODES
