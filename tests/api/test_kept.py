from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import ChatMessage, Document, Generate
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.event_log import EventLog
from kvblend.api.server.openai.kept import KeptResponses, text_chars

LIMITS = ApiLimits(kept_responses_max=3, kept_chars_max=100)


def response(name: str, status: str = "completed", chars: int = 1) -> dict[str, Any]:
    content = [{"type": "output_text", "text": "x" * chars}]
    return {"id": name, "status": status, "output": [{"content": content}]}


def test_a_response_that_runs_is_never_forgotten() -> None:
    kept = KeptResponses(LIMITS)
    kept.put(response("running", "in_progress"))
    for number in range(9):
        kept.put(response(str(number)))
    assert kept.get("running") is not None
    assert len(kept) == 4


def test_the_newest_is_kept_however_long_it_is_until_another_ends() -> None:
    kept = KeptResponses(LIMITS)
    kept.put(response("long", chars=101))
    assert kept.get("long") is not None
    kept.put(response("next"))
    assert (kept.get("long"), kept.get("next") is not None) == (None, True)


def test_instructions_and_metadata_count() -> None:
    assert text_chars({**response("a"), "instructions": "ab", "metadata": {"k": "v"}}) == 5


ASKED = Generate("r", (ChatMessage("user", "q"),), (Document("x" * 50, "t"),), "s")


def test_what_a_response_answers_counts_too() -> None:
    kept = KeptResponses(LIMITS)
    # 50 + 1 of the document, 1 of the question, 1 of the system prompt, and the answer
    kept.put(response("fits", chars=47), ASKED)
    assert kept.earlier("fits").system == "s"
    kept.put(response("fits", chars=48), ASKED)
    assert kept.get("fits") is not None
    with pytest.raises(RequestError, match="no longer kept"):
        kept.earlier("fits")


def test_its_events_count_too() -> None:
    kept, log = KeptResponses(LIMITS), EventLog()
    log.add([{"type": "t", "sequence_number": 0, "delta": "x" * 90}], ended=True)
    kept.put(response("a"), None, log)
    assert kept.log("a") is None


def test_its_own_events_go_before_other_responses() -> None:
    kept, log = KeptResponses(LIMITS), EventLog()
    log.add([{"type": "t", "sequence_number": 0, "delta": "x" * 90}], ended=True)
    kept.put(response("other"))
    kept.put(response("a"), ASKED, log)
    assert kept.get("other") is not None
    assert kept.earlier("a").messages[-1].content == "x"


def test_the_answer_stands_behind_what_was_asked() -> None:
    kept = KeptResponses(ApiLimits())
    kept.put(response("a", chars=3), ASKED)
    earlier = kept.earlier("a")
    assert earlier.messages == (ChatMessage("user", "q"), ChatMessage("assistant", "xxx"))
    assert (earlier.system, earlier.documents) == (ASKED.system, ASKED.documents)


@pytest.mark.parametrize(
    ("status", "chars", "code"),
    [
        ("in_progress", 1, "previous_response_not_found"),
        ("failed", 1, "invalid_request"),
        ("completed", 0, "invalid_request"),
    ],
)
def test_nothing_goes_on_from_one_without_an_answer(status: str, chars: int, code: str) -> None:
    kept = KeptResponses(ApiLimits())
    kept.put(response("a", status, chars), ASKED)
    with pytest.raises(RequestError) as caught:
        kept.earlier("a")
    assert (caught.value.code, caught.value.param) == (code, "previous_response_id")


STATES = st.sampled_from(("in_progress", "completed", "failed"))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), STATES | st.none(), st.integers(0, 120)), max_size=30))
def test_what_is_kept_stays_within_its_limits(steps: list[tuple[str, str | None, int]]) -> None:
    kept = KeptResponses(LIMITS)
    newest: dict[str, dict[str, Any]] = {}
    for name, status, chars in steps:
        if status is None:
            kept.drop(name)
            newest.pop(name, None)
        else:
            newest[name] = response(name, status, chars)
            kept.put(newest[name])
        found = {name: state for name in newest if (state := kept.get(name)) is not None}
        assert all(state is newest[name] for name, state in found.items())
        ended = [state for state in found.values() if state["status"] != "in_progress"]
        assert len(ended) <= LIMITS.kept_responses_max
        assert len(ended) == 1 or sum(map(text_chars, ended)) <= LIMITS.kept_chars_max
        assert status is None or name in found
        assert all(name in found for name, state in newest.items() if state["status"] == "in_progress")
