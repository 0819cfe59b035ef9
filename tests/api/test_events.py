from __future__ import annotations

from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import (
    Accepted,
    Delta,
    Failed,
    Finished,
    Planned,
    StoredChunk,
    StreamEvent,
    TokenLogprob,
    Usage,
)
from kvblend.api.server.events import ResponseEvents, error_event, error_fields, usage_fields
from kvblend.api.server.requests import FrameIds

USAGE = Usage(prompt_tokens=10, output_tokens=2, tokens_reused=6, tokens_recomputed=1, tokens_fresh=3)


def translate(
    *events: StreamEvent, extended: bool = True, generate: bool = True, ids: FrameIds | None = None
) -> list[dict[str, Any]]:
    translator = ResponseEvents("resp_1", "m", 12.7, ids or FrameIds(), extended=extended, generate=generate)
    return [out for event in events for out in translator.translate(event)]


def kinds(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["type"].removeprefix("response.") for frame in frames]


def test_an_answer_of_no_text_still_has_its_item() -> None:
    frames = translate(Accepted("resp_1", "m"), Finished("resp_1", "stop", USAGE))
    assert kinds(frames)[2:5] == ["output_item.added", "content_part.added", "output_text.done"]
    assert frames[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_cut_answer_is_incomplete_by_length() -> None:
    end = translate(Delta("resp_1", "x"), Finished("resp_1", "length", USAGE))[-1]
    assert (end["type"], end["response"]["finish_reason"]) == ("response.incomplete", "length")
    assert end["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert end["response"]["output"][0]["status"] == "incomplete"


def test_a_cancel_before_any_text_opens_no_item() -> None:
    frames = translate(Accepted("resp_1", "m"), Finished("resp_1", "cancelled", USAGE, detail="why"))
    assert kinds(frames) == ["created", "in_progress", "incomplete"]
    assert frames[-1]["response"]["incomplete_details"] == {"reason": "cancelled", "detail": "why"}


def test_a_failure_carries_the_error_of_the_table() -> None:
    end = translate(Failed("resp_1", "deadline_exceeded", "late", "deadline_ms"))[-1]
    assert end["response"]["status"] == "failed"
    error = end["response"]["error"]
    assert (error["status"], error["code"], error["param"]) == (504, "deadline_exceeded", "deadline_ms")


def test_nothing_follows_the_terminal_event() -> None:
    frames = translate(Finished("resp_1", "stop", USAGE), Delta("resp_1", "x"), Failed("resp_1", "internal", "y"))
    assert kinds(frames)[-1] == "completed"
    assert kinds(frames).count("failed") == 0


def test_an_ingest_ends_with_its_chunks() -> None:
    chunks = (StoredChunk("c", 5, True, "warm"),)
    frames = translate(Accepted("resp_1", "m"), Finished("resp_1", "stop", USAGE, chunks), generate=False)
    assert kinds(frames) == ["created", "completed"]
    assert frames[-1]["response"]["chunks"] == [{"id": "c", "tokens": 5, "created": True, "conditioning": "warm"}]


def test_our_own_fields_are_left_out_of_the_plain_protocol() -> None:
    events = (Accepted("resp_1", "m"), Planned("resp_1", USAGE), Delta("resp_1", "x", (4,)))
    plain = translate(*events, extended=False, ids=FrameIds("e", "s"))
    ours = translate(*events, ids=FrameIds("e", "s"))
    assert "kv" not in kinds(plain)
    assert not any({"response_id", "event_id", "token_ids"} & set(frame) for frame in plain)
    assert {frame["stream_id"] for frame in plain} == {"s"}
    assert all((frame["response_id"], frame["stream_id"]) == ("resp_1", "s") for frame in ours)
    assert ours[0]["event_id"] == "e"
    assert ours[-1]["token_ids"] == [4]


def test_log_probabilities_come_with_their_delta_and_in_the_plain_protocol_at_the_end() -> None:
    top = (TokenLogprob(4, -0.5, "x", b"x"),)
    said = (TokenLogprob(4, -0.5, "x", b"x", top, 0), TokenLogprob(2, -1.0, "<end>", None, (), 1))
    events = (Delta("resp_1", "x", (4, 2), said), Finished("resp_1", "stop", USAGE))
    plain, ours = translate(*events, extended=False), translate(*events)
    x = {"token": "x", "logprob": -0.5, "bytes": [120]}
    expected = [{**x, "top_logprobs": [x]}, {"token": "<end>", "logprob": -1.0, "bytes": [], "top_logprobs": []}]
    done = {frame["type"].removeprefix("response."): frame for frame in plain}
    assert done["output_text.delta"]["logprobs"] == done["output_text.done"]["logprobs"] == expected
    assert done["content_part.done"]["part"]["logprobs"] == expected
    assert done["completed"]["response"]["output"][0]["content"][0]["logprobs"] == expected
    delta = next(frame for frame in ours if frame["type"] == "response.output_text.delta")
    assert [(one["token_id"], one["bytes"], one["offset"]) for one in delta["logprobs"]] == [
        (4, [120], 0),
        (2, None, 1),
    ]
    assert "logprobs" not in ours[-1]["response"]["output"][0]["content"][0]


def test_without_log_probabilities_the_lists_are_empty() -> None:
    frames = translate(Delta("resp_1", "x", (4,)), Finished("resp_1", "stop", USAGE), extended=False)
    assert [frame["logprobs"] for frame in frames if "logprobs" in frame] == [[], []]


def test_usage_has_our_names_and_the_usual_ones() -> None:
    fields = usage_fields(USAGE)
    assert (fields["input_tokens"], fields["output_tokens"], fields["total_tokens"]) == (10, 2, 12)
    assert fields["input_tokens_details"] == {"cached_tokens": 6}
    assert (fields["tokens_reused"], fields["tokens_recomputed"], fields["tokens_fresh"]) == (6, 1, 3)


def test_an_error_names_what_it_answers() -> None:
    event = error_event(RequestError("rate_limited", "slow down", "stream_id", 1.5), FrameIds("e", "s"))
    assert (event["type"], event["status"], event["event_id"], event["stream_id"]) == ("error", 429, "e", "s")
    assert event["error"]["retry_after_s"] == 1.5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", "invalid_request_error"),
        ("rate_limited", "rate_limit_error"),
        ("overloaded", "server_error"),
    ],
)
def test_errors_have_the_usual_kind(code: str, kind: str) -> None:
    assert error_fields(code, "m", None)["type"] == kind


def test_a_code_outside_the_table_is_internal() -> None:
    assert error_fields("exploded", "m", None)["code"] == "internal"
