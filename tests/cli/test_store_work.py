"""Durations, and the bar that a maintenance job feeds."""

from __future__ import annotations

import time

import pytest

from kvblend.cli.failures import BadInput
from kvblend.cli.store_work import select


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800)])
def test_a_duration_counts_back_from_now(text: str, seconds: int) -> None:
    before = time.time() - seconds
    found = select(None, None, None, text).stored_before
    assert found is not None
    assert before <= found <= time.time() - seconds


def test_nothing_given_selects_all() -> None:
    assert select(None, None, None) == select([], None, None)


def test_a_word_is_no_duration() -> None:
    with pytest.raises(BadInput, match="'soon'"):
        select(None, None, None, "soon")
