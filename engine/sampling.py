"""The next token of every row: greedy, or drawn with noise of the row's own seed and position.

In this order: penalties and the least length (`engine.penalties`), temperature, top_k, top_p of what is left, min_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvblend.engine.logprobs import LOGPROBS_MAX

# a nucleus rarely holds more candidates than the first; sorting a whole vocabulary takes 20 ms
NUCLEUS_CANDIDATES = (256, 8192)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How one sequence chooses. `temperature` 0 is greedy; `top_p` in (0, 1]; `seed` any whole number.

    `top_k` tokens at most are drawn from (0: all), and none that is less than `min_p` times as likely as the likeliest.
    Penalties: `engine.penalties`; `end_ids` end the sequence and cannot be chosen before `min_tokens` others.
    `logprobs`: None, or how many of the likeliest tokens are reported beside the chosen one.

    Raises ValueError for a value outside its limits, NaN included.
    """

    temperature: float
    top_p: float
    seed: int
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature is {self.temperature}; it must be a finite number of at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must lie in 0..1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number")
        for name in ("top_k", "min_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.logprobs is not None and not 0 <= self.logprobs <= LOGPROBS_MAX:
            raise ValueError(f"logprobs is {self.logprobs}; it must lie in 0..{LOGPROBS_MAX}")

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before are penalised."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Adjustment(Protocol):
    """What a sequence's past does to its logits: `engine.penalties.Penalties` fits."""

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """The row `[vocab]` to choose from; `logits` `[vocab]` stay as they are."""
        ...


def sample(
    logits: torch.Tensor,
    plans: Sequence[SamplingPlan],
    positions: Sequence[int],
    adjustments: Sequence[Adjustment | None] = (),
) -> list[int]:
    """One token id per row of `logits` (float32 `[rows, vocab]`, any device), which stay as they are.

    `positions[i]` is where row i's token will stand. A row's choice depends on its own logits, plan, past and position
    only, never on the rows beside it. Raises ValueError where the counts differ or a row has NaN, +inf or nothing but
    -inf.
    """
    adjusts = adjustments or [None] * len(plans)
    if not len(plans) == len(positions) == len(adjusts) == logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(plans)} plans and {len(positions)} positions")
    # max carries NaN along, and its index is the first of equal ones: one look serves the check and the greedy rows
    highest, greedy = logits.max(dim=1)
    _check_finite(highest)
    chosen: list[int] = greedy.tolist()
    for row, (plan, position, past) in enumerate(zip(plans, positions, adjusts, strict=True)):
        if past is not None:
            own = past.adjust(logits[row])
            _check_finite(own.max()[None], row)
            chosen[row] = _draw(own.cpu(), plan, position) if plan.temperature > 0.0 else int(own.argmax())
        elif plan.temperature > 0.0:
            chosen[row] = _draw(logits[row].cpu(), plan, position)
    return chosen


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest of `values` `[vocab]`, largest first; equal ones from the lowest id."""
    # topk promises no order among equals: take its smallest value only, and all that reach it
    floor = values.topk(min(count, values.shape[0])).values[-1]
    ids = (values >= floor).nonzero().flatten()
    return ids[values[ids].sort(descending=True, stable=True).indices[:count]]


def _check_finite(highest: torch.Tensor, first: int = 0) -> None:
    for row, value in enumerate(highest.tolist(), first):
        if math.isnan(value):
            raise ValueError(f"logits of row {row} are NaN")
        if math.isinf(value):
            raise ValueError(f"logits of row {row} have {value} as their largest value")


def _draw(logits: torch.Tensor, plan: SamplingPlan, position: int) -> int:
    # the largest becomes 0 before the division, so that no temperature, however small, overflows
    scaled = (logits.double() - logits.max()) / plan.temperature
    noisy = scaled + _gumbel_noise(logits.shape[0], plan.seed, position)
    kept = _kept(scaled, plan)
    return int(noisy.argmax()) if kept is None else int(kept[noisy[kept].argmax()])


def _kept(scaled: torch.Tensor, plan: SamplingPlan) -> torch.Tensor | None:
    """Ids that may be drawn, likeliest first, of `scaled` logits whose largest is 0; None: all."""
    kept = largest(scaled, plan.top_k) if 0 < plan.top_k < scaled.shape[0] else None
    if plan.top_p < 1.0 and kept is None:
        kept = _nucleus(scaled.softmax(0), plan.top_p)
    elif plan.top_p < 1.0 and kept is not None:
        mass = scaled[kept].softmax(0).cumsum(0)
        kept = kept[: int((mass < plan.top_p).sum()) + 1]
    if plan.min_p > 0.0:
        likely = scaled.exp() >= plan.min_p
        kept = likely.nonzero().flatten() if kept is None else kept[likely[kept]]
    return kept


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ids of the fewest tokens whose mass reaches `top_p`, likeliest first; equal ones from the lowest id."""
    vocab = probabilities.shape[0]
    for most in (*NUCLEUS_CANDIDATES, vocab):
        ids = largest(probabilities, most)
        mass = probabilities[ids].cumsum(0)
        if mass[-1] >= top_p:
            break
    return ids[: int((mass < top_p).sum()) + 1]


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
