"""Several known tokens behind a prompt in one pass: teacher forcing, and greedy text with drafts checked in bulk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from kvblend.engine.evaluation.metrics import first_divergence
from kvblend.engine.kv import KVSlab
from kvblend.engine.model import Model
from kvblend.engine.selectors.base import Pass
from kvblend.engine.sequence import SequenceState
from kvblend.engine.step import Step, WorkItem


@dataclass(slots=True, eq=False)
class ForcedSequence(SequenceState):
    """A sequence that keeps the hidden states of every row of its last pass behind the prompt."""

    kept: torch.Tensor | None = None

    def end_pass(self) -> None:
        """As of any sequence; `kept` holds `[rows, hidden_size]`, the last layer's output, once the prompt is done."""
        behind_prompt = self.num_computed_tokens >= self.num_prompt_tokens
        SequenceState.end_pass(self)
        if behind_prompt and self.frontier is not None:
            self.kept = self.frontier.hidden

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Queue known tokens as the next rows: one pass through all layers. At least one."""
        start = self.num_computed_tokens
        stop = start + len(token_ids)
        self.token_ids[start:stop] = torch.tensor(token_ids, dtype=torch.int64)
        # observing attention in no layer makes the step keep all rows behind the last layer, not only the last one
        rows = torch.arange(start, stop)
        self.current = Pass(range(self.num_layers), rows, observe="attention", score_layers=frozenset())
        self.rows_started = 0
        self.frontier = self.kept = None

    def rewind(self, num_tokens: int) -> None:
        """Forget the rows from position `num_tokens` on, which lies behind the prompt; their slots are written anew."""
        if not self.num_prompt_tokens <= num_tokens <= self.num_computed_tokens:
            raise ValueError(
                f"num_tokens is {num_tokens}; there are {self.num_prompt_tokens}..{self.num_computed_tokens}"
            )
        self.num_computed_tokens = num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A finished prompt whose next tokens can be forced. `first` are float32 logits `[vocab_size]` of its last row."""

    step: Step
    state: ForcedSequence
    first: torch.Tensor

    @property
    def model(self) -> Model:
        """The model that computes."""
        return self.step.model

    @property
    def slab(self) -> KVSlab:
        """The sequence's KV slots."""
        return self.state.slab

    @torch.inference_mode()
    def force(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 logits `[len(token_ids), vocab_size]` behind the prompt and each but the last of these tokens.

        Row i is what the model expects where token i stands. The sequence ends where its prompt ends again.
        """
        if len(token_ids) < 2:
            return self.first[None, :].expand(len(token_ids), -1)
        logits = torch.cat((self.first[None, :], self._extend(token_ids[:-1])))
        self.state.rewind(self.state.num_prompt_tokens)
        return logits

    @torch.inference_mode()
    def continue_greedily(
        self, tokens_max: int, eos_ids: Collection[int], drafts: Collection[Sequence[int]] = ()
    ) -> list[int]:
        """The likeliest tokens, up to `tokens_max` or the first of `eos_ids`, which is included.

        `drafts` are texts it may turn out to be; those that agree so far are checked in one pass, which changes the
        time taken, not the result. The sequence ends where its prompt ends again.
        """
        return self._finish_text([int(self.first.argmax())], tokens_max, eos_ids, drafts)

    @torch.inference_mode()
    def follow(
        self,
        token_ids: Sequence[int],
        tokens_max: int,
        eos_ids: Collection[int],
        drafts: Collection[Sequence[int]] = (),
    ) -> tuple[torch.Tensor, list[int]]:
        """`force(token_ids)` and `continue_greedily(...)` with the forced tokens as the first draft, at once."""
        behind = [self._extend(token_ids[:-1])] if len(token_ids) > 1 else []
        logits = torch.cat((self.first[None, :], *behind))
        choices: list[int] = logits.argmax(-1).tolist()
        agreed = first_divergence(token_ids, choices)
        # the rows of all tokens but the last are computed
        tokens = choices[: agreed + 1]
        self.state.rewind(self.state.num_prompt_tokens + len(tokens) - 1)
        return logits, self._finish_text(tokens, tokens_max, eos_ids, drafts)

    def _finish_text(
        self, tokens: list[int], tokens_max: int, eos_ids: Collection[int], drafts: Collection[Sequence[int]]
    ) -> list[int]:
        while len(tokens) < tokens_max and tokens[-1] not in eos_ids:
            draft = self._draft(tokens, drafts)[: tokens_max - len(tokens) - 1]
            start = self.state.num_computed_tokens
            choices = self._extend([tokens[-1], *draft]).argmax(-1).tolist()
            agreed = first_divergence(draft, choices)
            tokens += choices[: agreed + 1]
            self.state.rewind(start + agreed + 1)
        self.state.rewind(self.state.num_prompt_tokens)
        end = next((index + 1 for index, token in enumerate(tokens) if token in eos_ids), len(tokens))
        return tokens[: min(end, tokens_max)]

    def _draft(self, tokens: list[int], drafts: Collection[Sequence[int]]) -> list[int]:
        for draft in drafts:
            if len(draft) > len(tokens) and list(draft[: len(tokens)]) == tokens:
                return list(draft[len(tokens) :])
        return []

    def _extend(self, token_ids: Sequence[int]) -> torch.Tensor:
        self.state.append_tokens(token_ids)
        while self.step.run([WorkItem(self.state, len(token_ids))])[0].status != "last_row":
            pass
        if self.state.kept is None:
            raise RuntimeError("the step kept no rows")
        return self.model.logits(self.state.kept)
