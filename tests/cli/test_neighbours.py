from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, permutations, sampled_from

from kvblend.cli.failures import BadInput
from kvblend.cli.neighbours import choose_neighbours

MILL = "the mill wheel stood by the river"
FIRE = "the mill by the river burned down"
CATS = "cats sleep all day long"
PETS = "dogs and cats make good pets"
CORPUS = (MILL, FIRE, CATS, PETS, "ice covers the northern sea", "!?", "...")


def test_the_most_similar_text_comes_first() -> None:
    assert [near[0] for near in choose_neighbours((MILL, CATS, FIRE, PETS), 2)] == [FIRE, PETS, MILL, CATS]


def test_no_text_is_its_own_neighbour_even_where_it_occurs_twice() -> None:
    assert choose_neighbours((MILL, MILL, FIRE), 2) == [(FIRE,), (FIRE,), (MILL,)]


def test_equally_similar_texts_are_taken_in_alphabetical_order() -> None:
    assert choose_neighbours(("one", "zebra", "apple", "maple"), 2)[0] == ("apple", "maple")


@pytest.mark.parametrize("texts", [(), (MILL,), (MILL, MILL)])
def test_a_corpus_of_one_text_has_no_neighbours(texts: tuple[str, ...]) -> None:
    assert choose_neighbours(texts, 3) == [()] * len(texts)


def test_a_corpus_without_words_has_neighbours_all_the_same() -> None:
    assert choose_neighbours(("!", "?"), 1) == [("?",), ("!",)]


@given(permutations(CORPUS), integers(1, 8))
def test_the_order_of_the_corpus_does_not_matter(texts: list[str], count: int) -> None:
    sorted_ones = dict(zip(sorted(CORPUS), choose_neighbours(sorted(CORPUS), count), strict=True))
    assert choose_neighbours(texts, count) == [sorted_ones[text] for text in texts]


@given(lists(sampled_from(CORPUS), max_size=8), integers(1, 8))
def test_as_many_as_there_are_and_none_twice(texts: list[str], count: int) -> None:
    for text, near in zip(texts, choose_neighbours(texts, count), strict=True):
        assert len(near) == min(count, len(set(texts)) - 1)
        assert len({*near, text}) == len(near) + 1


def test_a_missing_library_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(BadInput, match=r"pip install 'kvblend\[neighbours\]'"):
        choose_neighbours((MILL, FIRE), 1)
