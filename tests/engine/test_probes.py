"""Probes: reproducible questions whose parts lie in different chunks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.engine.evaluation.probes import CHUNKS, Dice, make_probes
from kvblend.engine.evaluation.questions import Question

SEEDS = st.integers(0, 1 << 40)


def holders(probe: Question, text: str) -> list[int]:
    """The chunks that hold `text` as whole words."""
    pattern = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
    return [index for index, (_, body) in enumerate(probe.documents) if pattern.search(body)]


def names_asked(probe: Question) -> list[str]:
    return re.findall(r"the ([A-Z]\w+ [A-Z]\w+)", probe.question)


@given(SEEDS, st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_a_seed_gives_exactly_so_many_and_always_the_same_questions(seed: int, count: int) -> None:
    probes = make_probes(seed, count)
    assert len(probes) == count
    assert probes == make_probes(seed, count)


@given(SEEDS)
@settings(max_examples=10, deadline=None)
def test_a_larger_count_only_appends(seed: int) -> None:
    assert make_probes(seed, 7)[:3] == make_probes(seed, 3)


def test_another_seed_gives_other_questions() -> None:
    assert not {p.question for p in make_probes(1, 8)} & {p.question for p in make_probes(2, 8)}


def test_all_questions_differ() -> None:
    questions = [probe.question for probe in make_probes(0, 400)]
    assert len(set(questions)) == 400


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_probe_has_six_chunks_of_a_passages_length_and_short_answers(seed: int) -> None:
    for probe in make_probes(seed, 4):
        assert len(probe.documents) == CHUNKS
        assert len({title for title, _ in probe.documents}) == CHUNKS
        assert all(100 <= len(text.split()) <= 150 for _, text in probe.documents)
        assert probe.answers
        assert all(1 <= len(answer.split()) <= 4 for answer in probe.answers)


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_an_alias_and_its_value_lie_in_different_chunks(seed: int) -> None:
    for probe in (make_probes(seed, 3)[0], make_probes(seed, 3)[2]):
        match = re.search(r"[A-Z]{2}-[A-Z]\d{3}", probe.question)
        assert match is not None
        (alias_at,) = holders(probe, match[0])
        (value_at,) = holders(probe, probe.answers[1])
        assert alias_at != value_at
        names = re.findall(r"[A-Z]\w+ [A-Z]\w+", probe.documents[value_at][1])
        assert any(alias_at in holders(probe, name) for name in names), "the two chunks share the alias"


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_the_larger_of_two_follows_from_two_chunks(seed: int) -> None:
    probe = make_probes(seed, 2)[1]
    values = {name: value_of(probe, name) for name in names_asked(probe)}
    assert len(values) == 2
    assert probe.answers[1] == max(values, key=lambda name: values[name])


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_sum_follows_from_two_chunks(seed: int) -> None:
    probe = make_probes(seed, 4)[3]
    first, second = names_asked(probe)
    assert holders(probe, first) != holders(probe, second)
    assert probe.answers[1] == str(value_of(probe, first) + value_of(probe, second))


def value_of(probe: Question, name: str) -> int:
    (at,) = holders(probe, name)
    (value,) = re.findall(r"\b\d+\b", probe.documents[at][1])
    return int(value)


def test_the_asked_chunk_stands_at_every_place() -> None:
    places = {holders(probe, probe.answers[1])[0] for probe in make_probes(5, 100)[::2]}
    assert places == set(range(CHUNKS))


def test_chunks_can_be_made_shorter() -> None:
    (probe,) = make_probes(0, 1, words=20)
    assert all(len(text.split()) < 70 for _, text in probe.documents)


@pytest.mark.parametrize(("count", "words", "said"), [(-1, 100, "count is -1"), (1, 9, "words is 9")])
def test_impossible_wishes_are_refused(count: int, words: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_probes(0, count, words)


def test_dice_draw_without_repetition_and_reach_everything() -> None:
    dice = Dice(3, "a")
    assert sorted(dice.some("abcdef", 6)) == list("abcdef")
    assert {dice.below(4) for _ in range(200)} == {0, 1, 2, 3}
