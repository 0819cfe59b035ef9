"""The next token of every row: greedy, or temperature and nucleus with noise of the row's own seed and position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# a nucleus rarely holds more candidates; where it does, the whole vocabulary is sorted
NUCLEUS_CANDIDATES = 256
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How one sequence chooses. `temperature` 0 is greedy; `top_p` in (0, 1]; `seed` any whole number.

    Raises ValueError for a temperature or top_p outside its limits, NaN included.
    """

    temperature: float
    top_p: float
    seed: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature is {self.temperature}; it must be a finite number of at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


def sample(logits: torch.Tensor, plans: Sequence[SamplingPlan], positions: Sequence[int]) -> list[int]:
    """One token id per row of `logits` (float32 `[rows, vocab]`, any device).

    `positions[i]` is where row i's token will stand. A row's choice depends on its own logits, plan and position only,
    never on the rows beside it. Raises ValueError where the counts differ or a row has NaN, +inf or nothing but -inf.
    """
    if not len(plans) == len(positions) == logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(plans)} plans and {len(positions)} positions")
    # max carries NaN along, and its index is the first of equal ones: one look serves the check and the greedy rows
    highest, greedy = logits.max(dim=1)
    _check_finite(highest)
    chosen: list[int] = greedy.tolist()
    for row, (plan, position) in enumerate(zip(plans, positions, strict=True)):
        if plan.temperature > 0.0:
            chosen[row] = _draw(logits[row].cpu(), plan, position)
    return chosen


def _check_finite(highest: torch.Tensor) -> None:
    for row, value in enumerate(highest.tolist()):
        if math.isnan(value):
            raise ValueError(f"logits of row {row} are NaN")
        if math.isinf(value):
            raise ValueError(f"logits of row {row} have {value} as their largest value")


def _draw(logits: torch.Tensor, plan: SamplingPlan, position: int) -> int:
    # the largest becomes 0 before the division, so that no temperature, however small, overflows
    scaled = (logits.double() - logits.max()) / plan.temperature
    noisy = scaled + _gumbel_noise(logits.shape[0], plan.seed, position)
    if plan.top_p >= 1.0:
        return int(noisy.argmax())
    kept = _nucleus(scaled.softmax(0), plan.top_p)
    return int(kept[noisy[kept].argmax()])


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ids of the fewest tokens whose mass reaches `top_p`, likeliest first; equal ones from the lowest id."""
    vocab = probabilities.shape[0]
    for most in (NUCLEUS_CANDIDATES, vocab):
        # topk promises no order among equals: take its smallest value only, and all tokens that reach it
        floor = probabilities.topk(min(most, vocab)).values[-1]
        ids = (probabilities >= floor).nonzero().flatten()
        ordered, order = probabilities[ids].sort(descending=True, stable=True)
        mass = ordered.cumsum(0)
        if mass[-1] >= top_p:
            break
    return ids[order[: int((mass < top_p).sum()) + 1]]


def _gumbel_noise(vocab: int, seed: int, position: int) -> torch.Tensor:
    """float64 `[vocab]` standard Gumbel noise of this seed and position, the same on every device."""
    generator = torch.Generator().manual_seed(_mix(seed, position))
    # from uniform numbers: torch's exponential_ takes three times as long; a 0 among them becomes -inf, never NaN
    uniform = torch.rand(vocab, dtype=torch.float64, generator=generator)
    return uniform.log_().neg_().log_().neg_()


def _mix(seed: int, position: int) -> int:
    """A 32-bit seed, all torch's generator takes, in which neighbouring seeds and positions have nothing in common."""
    mixed = _scramble(_scramble(seed & _MASK) ^ (position & _MASK))
    return mixed >> 32


def _scramble(value: int) -> int:
    """SplitMix64's step and finaliser: a bijection on 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
