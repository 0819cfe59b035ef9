from __future__ import annotations

from typing import Any

import pytest

from kvblend.engine.evaluation.questions import BadData, Question, parse_questions, pick_passages


def item(**changes: Any) -> dict[str, Any]:
    fields = {"ctxs": [{"title": "T", "text": "body"}], "question": "who?", "answers": ["me", "I"], **changes}
    return {name: value for name, value in fields.items() if value is not ...}


def test_a_question_keeps_order_titles_and_all_answers() -> None:
    data = [item(ctxs=[{"title": "A", "text": "a"}, {"title": "", "text": "b", "score": 1}], extra=0)]
    assert parse_questions(data) == [Question((("A", "a"), ("", "b")), "who?", ("me", "I"))]


def test_the_first_six_contexts_count() -> None:
    contexts = [{"title": "", "text": f"text {i}"} for i in range(9)]
    assert [text for _, text in parse_questions([item(ctxs=contexts)])[0].documents] == [f"text {i}" for i in range(6)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "the data is {}; it must be a list"),
        ([], "the data is an empty list"),
        ([item(), 7], r"data\[1\] is 7; it must be an object"),
        ([item(answers=...)], r"data\[0\].answers is missing; there is ctxs, question"),
        ([item(answers=[])], r"data\[0\].answers is \[\]; at least 1 answer"),
        ([item(answers="me")], r"data\[0\].answers is 'me'; it must be a list of answers"),
        ([item(answers=["me", " "])], r"data\[0\].answers\[1\] is ' '; it must be a text that is not blank"),
        ([item(question=None)], r"data\[0\].question is None; it must be a text"),
        ([item(ctxs=[])], r"data\[0\].ctxs is \[\]; at least 1 context"),
        ([item(ctxs=[{"title": "T"}])], r"data\[0\].ctxs\[0\].text is missing; there is title"),
        ([item(ctxs=[{"text": "t"}])], r"data\[0\].ctxs\[0\].title is missing"),
        ([item(ctxs=[{"title": 3, "text": "t"}])], r"data\[0\].ctxs\[0\].title is 3; it must be a text"),
        ([item(ctxs=[{"title": "T", "text": ""}])], r"data\[0\].ctxs\[0\].text is ''"),
        ([item(ctxs=["t"])], r"data\[0\].ctxs\[0\] is 't'; it must be an object"),
        ([item(question="\ud800")], r"data\[0\].question is not valid Unicode: a lone surrogate at character 0"),
        ("x" * 500, r"the data is 'x{59}\.\.\.; it must"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(data: object, message: str) -> None:
    with pytest.raises(BadData, match=message):
        parse_questions(data)


def asked(*documents: str, spare: tuple[str, ...] = ()) -> Question:
    """A question over documents without titles."""
    return Question(tuple(("", text) for text in documents), "q?", ("a",), tuple(("", text) for text in spare))


def test_contexts_behind_the_sixth_are_kept_apart() -> None:
    contexts = [{"title": "", "text": f"text {number}"} for number in range(8)]
    (question,) = parse_questions([{"ctxs": contexts, "question": "q?", "answers": ["a"]}])
    assert [text for _, text in question.spare] == ["text 6", "text 7"]


def test_passages_come_from_questions_that_are_not_asked_and_stand_in_no_prompt() -> None:
    found = pick_passages([asked("a", "b", spare=("c",))], [asked("b", "d", spare=("e",))], 9)
    assert [text for _, text in found[:2]] in (["d", "e"], ["e", "d"])
    assert [text for _, text in found[2:]] == ["c"]


def test_no_question_has_a_say_in_the_order_of_passages() -> None:
    others = [asked("d", "e"), asked("f", "g", "e")]
    assert pick_passages([asked("a")], others, 3) == pick_passages([asked("b")], others[::-1], 3)


def test_no_more_passages_than_wanted_are_picked_and_none_twice() -> None:
    found = pick_passages([asked("a")], [asked("d", "e"), asked("e", "f")], 2)
    assert len(found) == len(set(found)) == 2
