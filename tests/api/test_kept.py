from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvblend.api.server.limits import ApiLimits
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


def test_one_that_is_too_long_to_be_kept_is_not() -> None:
    kept = KeptResponses(LIMITS)
    kept.put(response("long", chars=101))
    assert kept.get("long") is None


def test_instructions_and_metadata_count() -> None:
    assert text_chars({**response("a"), "instructions": "ab", "metadata": {"k": "v"}}) == 5


STATES = st.sampled_from(("in_progress", "completed", "failed"))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), STATES | st.none(), st.integers(0, 60)), max_size=30))
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
        assert sum(map(text_chars, ended)) <= LIMITS.kept_chars_max
        assert all(name in found for name, state in newest.items() if state["status"] == "in_progress")
