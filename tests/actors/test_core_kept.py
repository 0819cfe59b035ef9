"""Sequences that are kept on the device for the next turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.actors.core.kept import Kept, KeptSequences, Origin
from kvblend.actors.messages import BlendOptions

EXACT = Origin("")
BLENDED = Origin("", blend=(0.15, BlendOptions()))


def kept(name: str, ids: tuple[int, ...], origin: Origin = EXACT, pages: int = 1, prompt: int = 1) -> Kept:
    return Kept(name, ids, (prompt,), origin, pages)


def found(sequences: KeptSequences, ids: tuple[int, ...], *origins: Origin) -> tuple[str, int] | None:
    best = sequences.find(origins or (EXACT,), ids)
    return (best[0].request_id, best[1]) if best else None


def test_the_sequence_that_is_continued_the_furthest_is_found() -> None:
    sequences = KeptSequences(8)
    sequences.keep(kept("short", (1, 2, 9)))
    sequences.keep(kept("long", (1, 2, 3, 4, 9)))
    assert found(sequences, (1, 2, 3, 4, 5)) == ("long", 4)


def test_a_prompt_asked_again_continues_nothing() -> None:
    sequences = KeptSequences(8)
    sequences.keep(kept("same", (1, 2, 3), prompt=3))
    assert found(sequences, (1, 2, 3)) is None


def test_another_question_over_the_same_beginning_continues_nothing() -> None:
    sequences = KeptSequences(8)
    context = tuple(range(100))
    sequences.keep(kept("asked", (*context, *range(200, 220)), prompt=120))
    assert found(sequences, (*context, *range(300, 330))) is None


def test_the_last_token_of_the_prompt_may_be_tokenised_anew() -> None:
    sequences = KeptSequences(8)
    prompt = tuple(range(100))
    sequences.keep(kept("asked", (*prompt, 7, 7), prompt=100))
    assert found(sequences, (*prompt[:99], 500, 501, 502)) == ("asked", 99)
    assert found(sequences, (*prompt[:98], *range(500, 520))) is None


def test_another_message_behind_an_earlier_turn_continues_that_turn() -> None:
    sequences = KeptSequences(8)
    sequences.keep(Kept("second", tuple(range(60)), (20, 40), EXACT, 1))
    assert found(sequences, (*range(25), *range(500, 520))) == ("second", 25)


def test_one_token_is_always_left_to_compute() -> None:
    sequences = KeptSequences(8)
    sequences.keep(kept("answered", (1, 2, 3, 4), prompt=2))
    assert found(sequences, (1, 2, 3)) == ("answered", 2)


def test_an_exact_request_never_begins_with_blended_kv() -> None:
    sequences = KeptSequences(8)
    sequences.keep(kept("blended", (1, 2, 3, 4), BLENDED))
    assert found(sequences, (1, 2, 3, 4, 5)) is None
    assert found(sequences, (1, 2, 3, 4, 5), EXACT, BLENDED) == ("blended", 4)


def test_nobody_begins_with_the_kv_of_another_salt() -> None:
    sequences = KeptSequences(8)
    sequences.keep(kept("theirs", (1, 2, 3, 4), Origin("them")))
    assert found(sequences, (1, 2, 3, 4, 5), EXACT, BLENDED) is None


def test_the_one_used_the_longest_ago_leaves_first() -> None:
    sequences = KeptSequences(2)
    sequences.keep(kept("a", (1, 2)))
    sequences.keep(kept("b", (3, 4)))
    found(sequences, (1, 2, 5))
    assert [gone.request_id for gone in sequences.keep(kept("c", (5, 6)))] == ["b"]
    assert "a" in {item.request_id for item in sequences}


def test_one_that_is_too_large_is_not_kept() -> None:
    sequences = KeptSequences(2)
    sequences.keep(kept("a", (1, 2)))
    large = kept("large", (3, 4), pages=3)
    assert sequences.keep(large) == [large]
    assert "a" in {item.request_id for item in sequences}


def test_the_next_turn_takes_the_place_of_the_one_it_began_with() -> None:
    sequences = KeptSequences(8)
    sequences.keep(kept("first", (1, 2)))
    assert [gone.request_id for gone in sequences.keep(kept("second", (1, 2, 3)))] == ["first"]


def test_what_another_already_covers_is_not_kept() -> None:
    sequences = KeptSequences(8)
    sequences.keep(kept("second", (1, 2, 3)))
    again = kept("first", (1, 2))
    assert sequences.keep(again) == [again]


def test_an_unknown_one_cannot_be_dropped() -> None:
    with pytest.raises(KeyError):
        KeptSequences(1).drop("nobody")


ids = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@given(st.lists(st.tuples(ids, st.integers(1, 3)), max_size=12), ids)
def test_pages_never_exceed_the_limit_and_finds_are_true_beginnings(
    given_ids: list[tuple[tuple[int, ...], int]], wanted: tuple[int, ...]
) -> None:
    sequences = KeptSequences(5)
    for number, (token_ids, pages) in enumerate(given_ids):
        sequences.keep(kept(str(number), token_ids, pages=pages))
        assert sequences.pages == sum(item.pages for item in sequences) <= 5
    best = sequences.find([EXACT], wanted)
    if best:
        assert best[0].token_ids[: best[1]] == wanted[: best[1]]
        assert best[1] < len(wanted)
