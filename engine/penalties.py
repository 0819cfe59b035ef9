"""What the tokens of a sequence so far do to its next logits: penalties on repeated ones, ends that come too early."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import torch

from kvblend.engine.sampling import SamplingPlan


class Penalties:
    """The tokens of one sequence, counted as they come; a step costs what is distinct among them, not their number.

    The repetition penalty is for tokens of prompt and output alike: positive logits are divided by it, others
    multiplied. The presence penalty is then taken from every token of the output, the frequency penalty as often as the
    token stands there. Ends are impossible until the output has `min_tokens` tokens.
    """

    def __init__(self, plan: SamplingPlan, prompt_ids: Sequence[int]) -> None:
        self._plan = plan
        self._tokens = 0
        self._places: dict[int, int] = {}
        self._ids = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.float32)
        self._ends = torch.tensor(sorted(set(plan.end_ids)), dtype=torch.int64)
        if plan.repetition_penalty != 1.0:
            self._add(dict.fromkeys(prompt_ids))

    @classmethod
    def of(cls, plan: SamplingPlan, prompt_ids: Sequence[int]) -> Self | None:
        """None where the plan asks for nothing of this."""
        ends = plan.min_tokens > 0 and bool(plan.end_ids)
        return cls(plan, prompt_ids) if plan.penalises or ends else None

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """The row `[vocab]` of the next token, on the device of `logits` `[vocab]`, which stay as they are."""
        plan = self._plan
        if not self._places and self._tokens >= plan.min_tokens:
            return logits
        out = logits.float().clone()
        if self._places:
            if self._ids.device != out.device:
                self._ids, self._counts = self._ids.to(out.device), self._counts.to(out.device)
            ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
            values, strength = out[ids], plan.repetition_penalty
            if strength != 1.0:
                values = torch.where(values > 0, values / strength, values * strength)
            values = values - plan.frequency_penalty * counts - plan.presence_penalty * (counts > 0)
            out[ids] = values
        if self._tokens < plan.min_tokens:
            out[self._ends.to(out.device)] = -torch.inf
        return out

    def note(self, token_id: int) -> None:
        """Count one token of the output."""
        self._tokens += 1
        if self._plan.penalises:
            if token_id not in self._places:
                self._add((token_id,))
            self._counts[self._places[token_id]] += 1.0

    def _add(self, new_ids: Iterable[int]) -> None:
        ids = list(new_ids)
        first = len(self._places)
        self._places.update(zip(ids, range(first, first + len(ids)), strict=True))
        if len(self._places) > self._ids.shape[0]:
            # grown by half, so that an answer of many different tokens copies each a few times only
            room = max(64, len(self._places) * 3 // 2)
            counts = torch.zeros(room, dtype=torch.float32, device=self._counts.device)
            counts[:first] = self._counts[:first]
            grown = torch.zeros(room, dtype=torch.int64, device=self._ids.device)
            grown[:first] = self._ids[:first]
            self._ids, self._counts = grown, counts
        self._ids[first : len(self._places)] = torch.tensor(ids, dtype=torch.int64, device=self._ids.device)
