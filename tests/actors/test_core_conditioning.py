"""What chunks are computed behind under each rule, and which variants are looked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from kvblend.actors.core.conditioning import ECHO, NEIGHBOURS, Conditioning, ConditioningKind
from kvblend.actors.core.conditioning import WARM as MARK

SYSTEM, WARM = (1, 2, 3), (7, 8, 9, 10)
KINDS: tuple[ConditioningKind, ...] = ("system", "bare", "warm", "neighbours")


def rule(kind: ConditioningKind, tokens_max: int = 100) -> Conditioning:
    return Conditioning(kind, WARM, tokens_max)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("bare", ()), ("system", (SYSTEM,)), ("warm", (SYSTEM, WARM)), ("neighbours", (SYSTEM, WARM))],
)
def test_what_a_chunk_is_computed_behind(kind: ConditioningKind, parts: tuple[tuple[int, ...], ...]) -> None:
    assert rule(kind).parts(SYSTEM, 5) == parts


@pytest.mark.parametrize(
    ("kind", "variants"),
    [
        ("bare", ((), SYSTEM)),
        ("system", (SYSTEM, ())),
        ("warm", ((*SYSTEM, *WARM, *MARK), (*SYSTEM, *WARM, *ECHO), SYSTEM, ())),
        ("neighbours", ((*SYSTEM, *NEIGHBOURS), (*SYSTEM, *WARM, *MARK), (*SYSTEM, *WARM, *ECHO), SYSTEM, ())),
    ],
)
def test_the_order_of_lookup(kind: ConditioningKind, variants: tuple[tuple[int, ...], ...]) -> None:
    assert rule(kind).variants(SYSTEM, 5) == variants


@pytest.mark.parametrize(("tokens", "parts"), [(3, (SYSTEM, WARM)), (4, (SYSTEM,))])
def test_a_chunk_that_does_not_fit_behind_the_warm_text_is_computed_behind_the_system_prompt(
    tokens: int, parts: tuple[tuple[int, ...], ...]
) -> None:
    assert rule("warm", 10).parts(SYSTEM, tokens) == parts


def test_a_chunk_that_does_not_fit_is_not_looked_for_behind_the_warm_text() -> None:
    assert rule("warm", 10).variants(SYSTEM, 4) == (SYSTEM, ())


@pytest.mark.parametrize(("kind", "tokens", "label"), [("bare", 3, "bare"), ("warm", 3, "warm"), ("warm", 4, "system")])
def test_the_label_says_what_it_became(kind: ConditioningKind, tokens: int, label: str) -> None:
    assert rule(kind, 10).label(SYSTEM, tokens) == label


def test_where_no_passage_fits_into_the_context_warm_is_system() -> None:
    empty = Conditioning("warm", (), 100)
    assert (empty.label(SYSTEM, 5), empty.behind(SYSTEM, 5)) == ("system", SYSTEM)


def test_without_a_system_prompt_the_warm_text_stands_alone() -> None:
    assert rule("warm").parts((), 5) == (WARM,)


def test_the_marks_are_no_tokens_of_any_vocabulary() -> None:
    assert NEIGHBOURS == ((1 << 32) - 1,)
    assert MARK == ((1 << 32) - 2,)


def test_the_kv_of_two_contexts_has_another_key_than_that_of_the_longer_one() -> None:
    assert rule("warm").behind(SYSTEM, 5) == (*SYSTEM, *WARM, *MARK)
    assert rule("system").behind(SYSTEM, 5) == SYSTEM


@given(sampled_from(KINDS), lists(integers(0, 50), max_size=6), integers(1, 12), integers(1, 20))
def test_what_is_computed_is_what_is_looked_for(
    kind: ConditioningKind, system: list[int], tokens: int, tokens_max: int
) -> None:
    conditioning, head = rule(kind, tokens_max), tuple(system)
    own = conditioning.behind(head, tokens)
    variants = conditioning.variants(head, tokens)
    assert own in variants
    assert len(set(variants)) == len(variants)
    assert variants.index(own) == (1 if kind == "neighbours" else 0)


def test_with_echo_a_warm_chunk_has_a_key_of_its_own_and_is_looked_for_first() -> None:
    echo = Conditioning("warm", WARM, 100, echo=True)
    assert echo.behind(SYSTEM, 5) == (*SYSTEM, *WARM, *ECHO)
    assert echo.variants(SYSTEM, 5) == ((*SYSTEM, *WARM, *ECHO), (*SYSTEM, *WARM, *MARK), SYSTEM, ())


@pytest.mark.parametrize(("tokens", "echoes"), [(4, True), (5, False)])
def test_a_chunk_whose_copy_does_not_fit_is_stored_without_its_echo(tokens: int, echoes: bool) -> None:
    tight = Conditioning("warm", WARM, 15, echo=True)
    assert tight.echoes(SYSTEM, tokens) is echoes
    assert tight.behind(SYSTEM, tokens) == (*SYSTEM, *WARM, *(ECHO if echoes else MARK))


@pytest.mark.parametrize("kind", ["system", "bare"])
def test_only_warm_chunks_have_an_echo(kind: ConditioningKind) -> None:
    assert not Conditioning(kind, WARM, 100, echo=True).echoes(SYSTEM, 5)
