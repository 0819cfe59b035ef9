"""How much was reused, by the server's own figures or by cached tokens."""

from __future__ import annotations

from typing import Any

import pytest
from loadtest.jobs import Job
from loadtest.outcome import Recording, classify, settle

POOL = ("w " * 45, "w " * 45)
JOB = Job(0, "w " * 10, (0, 1))


@pytest.mark.parametrize(
    ("hits", "misses", "expected"), [(2, 0, "full_hit"), (1, 1, "partial_hit"), (0, 2, "cold"), (0, 0, "cold")]
)
def test_kvblends_figures_come_first(hits: int, misses: int, expected: str) -> None:
    figures = {"chunk_hits": hits, "chunk_misses": misses}
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 1}}
    assert classify(JOB, POOL, Recording(JOB, figures=figures, usage=usage)) == expected


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ({"cached_tokens": 0}, "cold"),
        ({"cached_tokens": 40}, "partial_hit"),
        ({"cached_tokens": 85}, "full_hit"),
        ({}, "unknown"),
        (None, "unknown"),
    ],
)
def test_cached_tokens_are_compared_with_the_share_of_the_chunks(details: Any, expected: str) -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": details}
    assert classify(JOB, POOL, Recording(JOB, usage=usage)) == expected


def test_without_usage_words_and_pieces_are_counted() -> None:
    recording = Recording(JOB)
    recording.note("a", 1.0)
    recording.note("b", 1.5)
    outcome = settle(recording, POOL, "ok", "", 0.0, 0.0, 0.0)
    assert (outcome.input_tokens, outcome.output_tokens, outcome.estimated) == (100, 2, True)


def test_times_count_from_the_start() -> None:
    recording = Recording(JOB, sent=11.0)
    recording.note("a", 12.0)
    recording.note("b", 12.5)
    outcome = settle(recording, POOL, "ok", "", 10.0, 10.5, 0.0)
    assert (outcome.due_s, outcome.sent_s, outcome.first_s, outcome.gaps_s) == (0.5, 1.0, 2.0, [0.5])
