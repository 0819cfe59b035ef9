from __future__ import annotations

import pytest

from kvblend.samples import ANSWER, QUESTION, SYSTEM, Sample, load


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return load()


def test_there_are_enough_documents_to_reorder(samples: list[Sample]) -> None:
    assert 6 <= len(samples) <= 12


def test_every_document_has_its_own_title(samples: list[Sample]) -> None:
    titles = [sample.title for sample in samples]
    assert all(titles)
    assert len(set(titles)) == len(titles)


def test_titles_are_not_repeated_in_the_text(samples: list[Sample]) -> None:
    assert [s.title for s in samples if s.text.startswith("#") or s.text.startswith(s.title)] == []


def test_documents_are_of_a_chunk_s_size(samples: list[Sample]) -> None:
    words = {sample.title: len(sample.text.split()) for sample in samples}
    assert {title: count for title, count in words.items() if not 250 <= count <= 370} == {}


def test_exactly_one_document_answers_the_question(samples: list[Sample]) -> None:
    assert sum(ANSWER in sample.text for sample in samples) == 1


def test_question_and_system_prompt_are_single_lines() -> None:
    assert QUESTION.endswith("?")
    assert "\n" not in QUESTION + SYSTEM


def test_documents_are_plain_text(samples: list[Sample]) -> None:
    assert all(sample.text.isascii() and "\r" not in sample.text for sample in samples)
