"""The next token of every sequence of a tick, with its log probabilities where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvblend.engine.logprobs import LOGPROB_MIN
from kvblend.engine.penalties import Penalties
from kvblend.engine.sampling import SamplingPlan, largest, sample


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token. `logprob` is its own, `top` pairs the likeliest ids with theirs; None and () if not wanted."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Chooser:
    """How one sequence chooses, and what of its tokens matters for that."""

    def __init__(self, plan: SamplingPlan, prompt_ids: Sequence[int] = ()) -> None:
        self.plan = plan
        self.penalties = Penalties.of(plan, prompt_ids)


def choose(logits: torch.Tensor, choosers: Sequence[Chooser], positions: Sequence[int]) -> list[Choice | str]:
    """One choice per row of `logits` (`[rows, vocab]`), or what is wrong with the row, which fails it alone.

    `positions[i]` is where row i's token will stand. Chosen tokens are counted in their choosers.
    """
    plans, penalties = [chooser.plan for chooser in choosers], [chooser.penalties for chooser in choosers]
    tokens: list[int | str]
    try:
        tokens = list(sample(logits, plans, positions, penalties))
    except ValueError:
        rows = zip(logits.split(1), plans, positions, penalties, strict=True)
        tokens = [_sample_one(row, plan, position, past) for row, plan, position, past in rows]
    out: list[Choice | str] = []
    for row, (token, chooser) in enumerate(zip(tokens, choosers, strict=True)):
        if isinstance(token, str):
            out.append(token)
            continue
        if chooser.penalties is not None:
            chooser.penalties.note(token)
        wanted = chooser.plan.logprobs
        out.append(Choice(token) if wanted is None else score(logits[row], token, wanted))
    return out


def score(logits: torch.Tensor, token_id: int, count: int) -> Choice:
    """The log probabilities of a token and of the `count` likeliest, from one row `[vocab]` of the model's logits."""
    logprobs = logits.double().log_softmax(0).clamp(min=LOGPROB_MIN)
    # by the logits: what differs there may be equal in the logarithms
    ids = largest(logits, count) if count else torch.empty(0, dtype=torch.int64, device=logits.device)
    picked = logprobs[torch.cat((torch.tensor([token_id], device=ids.device), ids))].tolist()
    return Choice(token_id, picked[0], tuple(zip(ids.tolist(), picked[1:], strict=True)))


def _sample_one(row: torch.Tensor, plan: SamplingPlan, position: int, past: Penalties | None) -> int | str:
    try:
        return sample(row, [plan], [position], [past])[0]
    except ValueError as error:
        return str(error)
