"""Requests and events of the WebSocket."""

from __future__ import annotations

import pytest
from loadtest.jobs import Job
from loadtest.options import read_options
from loadtest.outcome import Recording, RequestFailed
from loadtest.ws import make_fields, read_event

from kvblend.actors.messages import Failed, Finished, Usage

JOB = Job(0, "why?", (1, 0), 7)


def test_documents_and_fields_of_the_users_own() -> None:
    more = '{"mode": "full", "min_p": 0.1}'
    options = read_options(["--backend", "kvblend", "--extra-body", more, "--system", "s", "--ignore-eos"])
    assert make_fields(JOB, ("first", "second"), options) == {
        "query": "why?",
        "max_tokens": 7,
        "documents": ["second", "first"],
        "system": "s",
        "mode": "full",
        "min_p": 0.1,
        "ignore_eos": True,
    }


def test_the_figures_of_the_end_are_kept() -> None:
    recording = Recording(JOB)
    read_event(Finished("r", "length", Usage(prompt_tokens=9, output_tokens=2, chunk_hits=1)), recording)
    assert (recording.usage["prompt_tokens"], recording.usage["completion_tokens"]) == (9, 2)
    assert recording.figures["chunk_hits"] == 1


@pytest.mark.parametrize("event", [Failed("r", "internal", "broke"), Finished("r", "cancelled", Usage())])
def test_an_answer_that_ended_early_failed(event: Failed | Finished) -> None:
    with pytest.raises(RequestFailed):
        read_event(event, Recording(JOB))
