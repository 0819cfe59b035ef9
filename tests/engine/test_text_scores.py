from __future__ import annotations

import pytest

from kvblend.engine.evaluation.text_scores import normalise, score_text, token_f1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("The Exeter College.", "exeter college"), ("  a  B-52 ", "b52"), ("an apple, a day", "apple day"), ("the", "")],
)
def test_normalisation_is_squads(text: str, wanted: str) -> None:
    assert normalise(text) == wanted


def test_f1_counts_shared_words_as_often_as_both_have_them() -> None:
    # shared: red red; precision 2/4, recall 2/3
    assert token_f1("red red red blue", "red red green") == pytest.approx(4 / 7)


@pytest.mark.parametrize(("answer", "gold", "f1"), [("", "the", 1.0), ("", "x", 0.0), ("x", "", 0.0), ("x", "y", 0.0)])
def test_f1_without_shared_words(answer: str, gold: str, f1: float) -> None:
    assert token_f1(answer, gold) == f1


def test_the_best_gold_answer_counts() -> None:
    scores = score_text("Exeter", ["Oxford", "the Exeter"])
    assert (scores.f1, scores.em) == (1.0, 1.0)
    assert scores.rouge_l == pytest.approx(2 / 3)


def test_an_almost_right_answer_is_no_exact_match() -> None:
    assert score_text("Exeter College", ["Exeter"]).em == 0.0


def test_rouge_goes_by_order_where_f1_does_not() -> None:
    scores = score_text("one two three", ["three two one"])
    assert scores.f1 == 1.0
    assert scores.rouge_l == pytest.approx(1 / 3)
