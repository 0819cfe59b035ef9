from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.evaluation.metrics import (
    entropy_per_position,
    first_divergence,
    kl_per_position,
    negative_log_likelihood,
    top1_agreement,
)

HALVES, QUARTERS = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()


def test_kl_is_the_one_computed_by_hand_in_the_right_direction() -> None:
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_per_position(HALVES, QUARTERS) == pytest.approx([by_hand])
    by_hand = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert kl_per_position(QUARTERS, HALVES) == pytest.approx([by_hand])


def test_kl_counts_a_probability_of_zero_as_nothing() -> None:
    sure = torch.tensor([[0.0, -math.inf]])
    assert kl_per_position(sure, HALVES) == pytest.approx([math.log(2)])


def test_kl_has_one_entry_per_position() -> None:
    both = torch.cat((HALVES, QUARTERS))
    assert kl_per_position(both, both.flip(0))[0] != pytest.approx(kl_per_position(both, both.flip(0))[1])


@given(st.integers(0, 1000), st.floats(-50, 50))
def test_kl_is_zero_for_equal_distributions_only(seed: int, shift: float) -> None:
    logits = torch.randn((3, 7), generator=torch.Generator().manual_seed(seed))
    # a constant added to logits is the same distribution
    assert max(kl_per_position(logits, logits + shift)) < 1e-9
    assert min(kl_per_position(logits, logits.flip(1))) > 0


def test_likelihood_is_the_mean_over_tokens() -> None:
    logits = torch.cat((HALVES, QUARTERS))
    assert negative_log_likelihood(logits, [0, 1]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)


def test_agreement_is_the_share_of_positions() -> None:
    assert top1_agreement(torch.eye(4), torch.eye(4)[[0, 1, 3, 2]]) == 0.5


def test_entropy_is_that_of_the_distribution() -> None:
    sure = torch.tensor([[0.0, -math.inf]])
    assert entropy_per_position(torch.cat((HALVES, sure))) == pytest.approx([math.log(2), 0.0])


@pytest.mark.parametrize(
    ("reference", "other", "shared"), [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([], [1], 0), ([1], [2], 0)]
)
def test_divergence_comes_behind_the_shared_beginning(reference: list[int], other: list[int], shared: int) -> None:
    assert first_divergence(reference, other) == shared
