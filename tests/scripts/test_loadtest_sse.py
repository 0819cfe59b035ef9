"""Server-sent events, however they are parted, and the bodies of requests."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest.jobs import Job
from loadtest.options import read_options
from loadtest.outcome import Recording, RequestFailed
from loadtest.sse import EventParser, make_body, read_chunk

STREAM = ": hi\n\nevent: x\ndata: süß\r\n\r\ndata:two\ndata: lines\n\nid: 3\n\ndata: [DONE]\n\n".encode()
POOL = ("first", "second")
JOB = Job(0, "why?", (1, 0), 7)


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_wherever_the_bytes_are_parted(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    found = [d for a, b in itertools.pairwise(bounds) for d in parser.feed(STREAM[a:b])]
    assert found == ["süß", "two\nlines", "[DONE]"]


def test_parts_of_a_message() -> None:
    body = make_body(JOB, POOL, read_options(["--system", "be brief"]), "m")
    texts = [{"type": "text", "text": text} for text in ("second", "first", "why?")]
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": texts}]
    assert (body["model"], body["max_tokens"], body["stream_options"]) == ("m", 7, {"include_usage": True})


def test_documents() -> None:
    body = make_body(JOB, POOL, read_options(["--chunks-as", "documents"]), "m")
    assert body["documents"] == [{"text": "second"}, {"text": "first"}]
    assert body["messages"] == [{"role": "user", "content": "why?"}]


def test_a_prompt_joined_with_the_separator() -> None:
    body = make_body(JOB, POOL, read_options(["--backend", "openai", "--separator", "|", "--system", "s"]), "m")
    assert body["prompt"] == "s|second|first|why?"


def test_a_plain_prompts_first_piece_is_no_chunk() -> None:
    body = make_body(JOB, POOL, read_options(["--backend", "openai", "--separator", "|"]), "m")
    assert body["prompt"].split("|")[1:] == ["second", "first", "why?"]


def test_fields_of_the_users_own_are_sent() -> None:
    body = make_body(JOB, POOL, read_options(["--extra-body", '{"max_tokens": 2, "seed": 1}', "--ignore-eos"]), "m")
    assert (body["max_tokens"], body["seed"], body["ignore_eos"]) == (2, 1, True)


def test_the_first_text_is_not_the_role() -> None:
    recording = Recording(JOB)
    read_chunk('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', recording, 1.0)
    read_chunk('{"choices": [{"delta": {"content": "a"}}]}', recording, 2.0)
    assert recording.stamps == [2.0]


def test_usage_comes_without_a_choice() -> None:
    recording = Recording(JOB)
    read_chunk('{"choices": [], "usage": {"prompt_tokens": 3}, "kvblend": {"chunk_hits": 1}}', recording, 1.0)
    assert (recording.usage, recording.figures) == ({"prompt_tokens": 3}, {"chunk_hits": 1})


@pytest.mark.parametrize("data", ['{"error": {"message": "too late"}}', "{", "[]", '{"error": "too late"}'])
def test_what_is_no_answer_is_a_failure(data: str) -> None:
    with pytest.raises(RequestFailed):
        read_chunk(data, Recording(JOB), 1.0)
