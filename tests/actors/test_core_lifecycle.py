"""The table of phases."""

from __future__ import annotations

import pytest

from kvblend.actors.core.lifecycle import TERMINAL_PHASES, TRANSITIONS, IllegalTransition, Phase, check_transition


def test_every_phase_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(Phase)


@pytest.mark.parametrize("phase", sorted(set(Phase) - TERMINAL_PHASES))
def test_every_open_phase_can_end_in_every_way(phase: Phase) -> None:
    assert TRANSITIONS[phase] >= TERMINAL_PHASES


@pytest.mark.parametrize("phase", sorted(TERMINAL_PHASES))
def test_an_end_is_final(phase: Phase) -> None:
    assert TRANSITIONS[phase] == frozenset()


def test_nobody_goes_back_to_the_queue_after_the_first_token() -> None:
    with pytest.raises(IllegalTransition, match="request r cannot go from decoding to queued"):
        check_transition("r", Phase.DECODING, Phase.QUEUED)


def test_a_legal_transition_passes() -> None:
    check_transition("r", Phase.QUEUED, Phase.LOADING)
