"""Penalties and the least length, each against its definition written out over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.penalties import Penalties
from kvblend.engine.sampling import SamplingPlan

VOCAB = 12
ids = st.lists(st.integers(0, VOCAB - 1), max_size=30)
rows = st.lists(st.floats(-10.0, 10.0, width=32), min_size=VOCAB, max_size=VOCAB)


def plan(**changes: float | int | tuple[int, ...]) -> SamplingPlan:
    return SamplingPlan(0.0, 1.0, 0, **changes)  # type: ignore[arg-type]


def adjusted(wanted: SamplingPlan, prompt: list[int], output: list[int], row: list[float]) -> list[float]:
    penalties = Penalties(wanted, prompt)
    for token in output:
        penalties.note(token)
    return list(penalties.adjust(torch.tensor(row)).tolist())


def by_definition(
    prompt: list[int], output: list[int], row: list[float], repetition: float, presence: float, frequency: float
) -> list[float]:
    out = []
    for token, logit in enumerate(row):
        value = logit
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        out.append(value - frequency * output.count(token) - presence * (token in output))
    return out


@given(ids, ids, rows, st.floats(0.1, 5.0), st.floats(-2.0, 2.0), st.floats(-2.0, 2.0))
def test_penalties_are_what_their_definition_says(
    prompt: list[int], output: list[int], row: list[float], repetition: float, presence: float, frequency: float
) -> None:
    wanted = plan(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    expected = by_definition(prompt, output, row, repetition, presence, frequency)
    assert adjusted(wanted, prompt, output, row) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(ids, ids, rows, st.randoms(use_true_random=False))
def test_the_order_of_the_output_does_not_matter(prompt: list[int], output: list[int], row: list[float], dice) -> None:  # type: ignore[no-untyped-def]
    wanted = plan(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    shuffled = list(output)
    dice.shuffle(shuffled)
    assert adjusted(wanted, prompt, shuffled, row) == pytest.approx(adjusted(wanted, prompt, output, row))


def test_the_prompt_counts_for_repetition_only() -> None:
    wanted = plan(presence_penalty=1.0, frequency_penalty=1.0)
    assert adjusted(wanted, [1, 1, 2], [], [3.0] * VOCAB) == [3.0] * VOCAB
    assert adjusted(plan(repetition_penalty=2.0), [1], [], [3.0] * VOCAB)[:3] == [3.0, 1.5, 3.0]


def test_a_negative_logit_becomes_smaller_by_repetition() -> None:
    assert adjusted(plan(repetition_penalty=2.0), [0], [], [-3.0] * VOCAB)[:2] == [-6.0, -3.0]


def test_the_frequency_counts_each_time_and_presence_once() -> None:
    assert adjusted(plan(frequency_penalty=0.5), [], [4, 4, 4], [0.0] * VOCAB)[4] == -1.5
    assert adjusted(plan(presence_penalty=0.5), [], [4, 4, 4], [0.0] * VOCAB)[4] == -0.5


def test_ends_are_impossible_until_there_are_enough_tokens() -> None:
    penalties = Penalties(plan(min_tokens=2, end_ids=(3, 5)), [])
    for token in (0, 1):
        out = penalties.adjust(torch.zeros(VOCAB)).tolist()
        assert [i for i, value in enumerate(out) if value == -math.inf] == [3, 5]
        penalties.note(token)
    assert penalties.adjust(torch.zeros(VOCAB)).tolist() == [0.0] * VOCAB


def test_the_models_logits_stay_as_they_are() -> None:
    logits = torch.ones(VOCAB)
    penalties = Penalties(plan(repetition_penalty=3.0, min_tokens=1, end_ids=(2,)), [1])
    penalties.adjust(logits)
    assert logits.tolist() == [1.0] * VOCAB


@pytest.mark.parametrize(
    ("wanted", "needed"),
    [
        (plan(), False),
        (plan(end_ids=(1,)), False),
        (plan(min_tokens=3), False),
        (plan(min_tokens=3, end_ids=(1,)), True),
        (plan(repetition_penalty=1.1), True),
        (plan(presence_penalty=-0.1), True),
        (plan(frequency_penalty=0.1), True),
    ],
)
def test_a_plan_that_asks_for_nothing_has_none(wanted: SamplingPlan, needed: bool) -> None:
    assert (Penalties.of(wanted, [1, 2]) is not None) == needed


def test_many_different_tokens_are_all_counted() -> None:
    penalties = Penalties(plan(frequency_penalty=1.0), [])
    for token in range(500):
        penalties.note(token)
        penalties.note(499 - token)
    assert penalties.adjust(torch.zeros(600)).tolist() == [-2.0] * 500 + [0.0] * 100
