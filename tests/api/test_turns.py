from __future__ import annotations

from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import ChatMessage, Document
from kvblend.api.server.fields import Fields, relocate
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.turns import Turns, neutral, parse_turns

LIMITS = ApiLimits()


def parts(*texts: str, role: str = "user", kind: str = "text") -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


def turns(*items: object, before: int = 0) -> Turns:
    return parse_turns(list(items), "messages", LIMITS, before)


def test_parts_of_the_first_question_but_the_last_are_documents() -> None:
    read = turns(parts("mill", "bridge", "where?"))
    assert read.documents == [Document("mill"), Document("bridge")]
    assert read.messages == [ChatMessage("user", "where?")]


def test_blank_parts_count_for_nothing() -> None:
    assert turns(parts("mill", " ", "where?", "")).documents == [Document("mill")]


def test_parts_of_later_messages_are_joined() -> None:
    read = turns(parts("q"), parts("a", "b", role="assistant", kind="output_text"), parts("c", "d", kind="input_text"))
    assert [message.content for message in read.messages] == ["q", "a\n\nb", "c\n\nd"]
    assert read.documents == []


def test_leading_system_messages_are_joined() -> None:
    read = turns({"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, parts("q"))
    assert (read.system, len(read.messages)) == ("a\n\nb", 1)


def test_a_conversation_may_bring_no_system_prompt_or_an_empty_one() -> None:
    assert turns(parts("q")).system is None
    assert turns({"role": "system", "content": ""}, parts("q")).system == ""


def test_what_an_earlier_answer_carries_along_is_taken() -> None:
    echoed: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "id": "msg_1",
        "status": "completed",
    }
    assert turns(parts("q"), echoed).messages[1] == ChatMessage("assistant", "a")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("messages[0].content", "messages[1].content"),
        ("messages[1].content", "messages[2].content"),
        ("documents[2].text", "messages[1].content[0].text"),
        ("documents[3].text", "messages[1].content[1].text"),
        ("documents[1].text", "documents[1].text"),
        ("stop", "stop"),
    ],
)
def test_paths_of_the_engine_lead_back_to_the_senders(ours: str, theirs: str) -> None:
    read = turns({"role": "system", "content": "s"}, parts("a", "b", "q"), parts("x", role="assistant"), before=2)
    error = relocate(RequestError("invalid_request", f"{ours} is odd", ours), read.places)
    assert (error.param, error.message) == (theirs, f"{theirs} is odd")


def test_an_error_of_no_field_stays_as_it_is() -> None:
    error = RequestError("overloaded", "busy", retry_after_s=2.0)
    assert relocate(error, [("messages[0]", "messages[1]")]) is error


@pytest.mark.parametrize("value", [1, 0.0, None])
def test_a_neutral_value_passes(value: object) -> None:
    neutral(Fields({"n": value}, "", ("n",)), {"n": (1, 0)})


@pytest.mark.parametrize("value", [2, True, False, "1", [], {"a": 1}])
def test_any_other_value_is_refused_by_name(value: object) -> None:
    with pytest.raises(RequestError, match=r"^n: .*not supported"):
        neutral(Fields({"n": value}, "", ("n",)), {"n": (1, 0)})
