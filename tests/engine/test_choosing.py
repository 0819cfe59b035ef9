"""Choices of a tick: log probabilities of the model's own logits, faults of single rows, order of rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from second_device import DEVICE, SecondDevice

from kvblend.engine.choosing import Choice, Chooser, choose, score
from kvblend.engine.logprobs import LOGPROB_MIN
from kvblend.engine.sampling import SamplingPlan

GREEDY = SamplingPlan(0.0, 1.0, 0)
rows = st.lists(st.floats(-20.0, 20.0, width=32), min_size=1, max_size=20)


def one(logits: list[float], plan: SamplingPlan, prompt: tuple[int, ...] = (), position: int = 0) -> Choice:
    (choice,) = choose(torch.tensor([logits]), [Chooser(plan, prompt)], [position])
    assert isinstance(choice, Choice)
    return choice


@given(rows, st.data())
def test_logprobs_are_the_softmaxs_logarithm(row: list[float], data: st.DataObject) -> None:
    token, count = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, 20))
    expected = torch.tensor(row, dtype=torch.float64).log_softmax(0)
    choice = score(torch.tensor(row), token, count)
    assert choice.logprob == pytest.approx(float(expected[token]))
    best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert [name for name, _ in choice.top] == best
    assert [value for _, value in choice.top] == pytest.approx([float(expected[i]) for i in best])


@given(rows)
def test_probabilities_of_the_whole_vocabulary_sum_to_one(row: list[float]) -> None:
    assert math.fsum(math.exp(value) for _, value in score(torch.tensor(row), 0, 20).top) == pytest.approx(1.0)


def test_what_is_impossible_has_a_number_that_json_can_write() -> None:
    assert score(torch.tensor([0.0, -math.inf]), 1, 2).top == ((0, 0.0), (1, LOGPROB_MIN))


def test_logprobs_are_those_before_penalties_and_temperature() -> None:
    logits = [2.0, 1.9, 0.0]
    plan = SamplingPlan(0.7, 1.0, 3, top_k=1, repetition_penalty=5.0, logprobs=1)
    choice = one(logits, plan, prompt=(0,))
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    assert choice.token_id == 1
    assert choice.logprob == pytest.approx(float(expected[1]))
    assert [name for name, _ in choice.top] == [0]
    assert choice.top[0][1] == pytest.approx(float(expected[0]))


def test_equal_ones_come_from_the_lowest_id_as_the_greedy_choice_does() -> None:
    choice = one([1.0, 4.0, 4.0, 4.0], SamplingPlan(0.0, 1.0, 0, logprobs=2))
    assert [choice.token_id, *(name for name, _ in choice.top)] == [1, 1, 2]


def test_nothing_is_computed_where_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvblend.engine.choosing.score", None)
    assert one([0.0, 1.0], GREEDY) == Choice(1)


def test_zero_likeliest_gives_the_chosen_one_alone() -> None:
    choice = one([0.0, 0.0], SamplingPlan(0.0, 1.0, 0, logprobs=0))
    assert choice.logprob == pytest.approx(math.log(0.5))
    assert choice.top == ()


def test_a_chosen_token_is_counted() -> None:
    chooser = Chooser(SamplingPlan(0.0, 1.0, 0, presence_penalty=2.0))
    logits = torch.tensor([[3.0, 2.0, 0.0]])
    assert [choose(logits, [chooser], [i]) for i in range(2)] == [[Choice(0)], [Choice(1)]]


def test_a_row_that_is_nan_fails_alone() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    assert choose(logits, [Chooser(GREEDY), Chooser(GREEDY)], [0, 0]) == [Choice(1), "logits of row 0 are NaN"]


def test_a_row_in_which_nothing_is_left_fails_alone() -> None:
    nothing = Chooser(SamplingPlan(0.0, 1.0, 0, min_tokens=1, end_ids=(0, 1)))
    good, bad = choose(torch.zeros((2, 2)), [Chooser(GREEDY), nothing], [0, 0])
    assert good == Choice(0)
    assert bad == "logits of row 0 have -inf as their largest value"


def test_after_a_fault_of_another_row_a_token_is_counted_once() -> None:
    chooser = Chooser(SamplingPlan(0.0, 1.0, 0, frequency_penalty=1.0))
    logits = torch.tensor([[3.0, 1.5], [math.nan, 0.0]])
    choose(logits, [chooser, Chooser(GREEDY)], [0, 0])
    assert choose(torch.tensor([[3.0, 1.5]]), [chooser], [1]) == [Choice(0)]


def test_on_a_device_everything_happens_there() -> None:
    plans = (
        SamplingPlan(0.0, 1.0, 0, repetition_penalty=1.5, min_tokens=2, end_ids=(3,), logprobs=2),
        SamplingPlan(1.0, 0.9, 4, top_k=3, frequency_penalty=0.5, logprobs=0),
    )
    logits = torch.randn((2, 30), generator=torch.Generator().manual_seed(2))

    def run(device: torch.device | str) -> list[list[Choice | str]]:
        choosers = [Chooser(plan, (1, 2)) for plan in plans]
        rows = logits.to(device)
        return [choose(rows, choosers, (step, step)) for step in range(4)]

    here = run("cpu")
    with SecondDevice():
        assert run(DEVICE) == here


@given(st.integers(0, 1 << 30))
def test_rows_may_stand_in_any_order(seed: int) -> None:
    dice = random.Random(seed)
    count = 6
    logits = torch.randn((count, 30), generator=torch.Generator().manual_seed(seed))
    plans = [
        SamplingPlan(
            dice.choice((0.0, 0.8, 1.5)),
            dice.choice((1.0, 0.7)),
            dice.randrange(1000),
            top_k=dice.choice((0, 5)),
            min_p=dice.choice((0.0, 0.2)),
            repetition_penalty=dice.choice((1.0, 1.4)),
            logprobs=dice.choice((None, 3)),
        )
        for _ in range(count)
    ]
    prompts = [tuple(dice.randrange(30) for _ in range(5)) for _ in range(count)]
    order = dice.sample(range(count), count)
    straight = choose(logits, [Chooser(p, t) for p, t in zip(plans, prompts, strict=True)], range(count))
    mixed = choose(logits[order], [Chooser(plans[i], prompts[i]) for i in order], order)
    assert mixed == [straight[i] for i in order]
