"""The plain selector: one pass over what must be computed anyway."""

from __future__ import annotations

import pytest
import torch

from kvblend.engine.selectors.base import Observation, SelectionContext
from kvblend.engine.selectors.plain import PlainSelector

CONTEXT = SelectionContext(
    num_layers=3,
    num_tokens=8,
    cached_rows=torch.tensor([2, 3, 4]),
    fresh_rows=torch.tensor([5, 6, 7]),
    question_rows=torch.tensor([6, 7]),
    budget=2,
)


def test_one_pass_over_the_fresh_rows_through_all_layers() -> None:
    passes = list(PlainSelector().passes(CONTEXT))
    assert len(passes) == 1
    assert passes[0].layers == range(3)
    assert passes[0].rows.tolist() == [5, 6, 7]
    assert (passes[0].stop, passes[0].observe) == ("output", "nothing")


def test_it_ends_after_its_pass() -> None:
    passes = PlainSelector().passes(CONTEXT)
    next(passes)
    with pytest.raises(StopIteration):
        passes.send(Observation(CONTEXT.fresh_rows))
