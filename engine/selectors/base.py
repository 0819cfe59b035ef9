"""A selector plans one blend as passes over layers and rows; the device step executes passes and knows no method."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kvblend.engine.residual import Residual
from kvblend.engine.selectors.spec import SelectorSpec

Observe = Literal["nothing", "divergence", "attention"]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Compute `rows` (int64 positions on the CPU, strictly ascending) through `layers`.

    A pass starts at layer 0 (from the embedding) or where the one before it ended, with a subset of its rows.
    With `stop` "qkv" the last layer only projects: its K and V are written, and a pass that starts at that very layer
    goes on from there. `observe` says what the selector wants to see: "divergence" (per row, at the last layer) or
    "attention" (per key, summed over the layers of `score_layers`, all when None). A `residual` corrects the cached
    rows that are not in this pass.

    Rows behind the prompt are drafts: guesses at the answer, whose token ids are `drafts`, from the first of them on.
    `shows_from`: of a pass through the last layer, the logits of its rows from this position on come back.
    `restores`: cached slots get what was loaded once more, layer by layer, before this pass and those behind it.

    A row sees every slot below it, so fresh rows below it must be in this pass or an earlier one: slots that nothing
    was loaded or computed into hold arbitrary numbers.
    """

    layers: range
    rows: torch.Tensor
    stop: Literal["output", "qkv"] = "output"
    observe: Observe = "nothing"
    score_layers: frozenset[int] | None = None
    residual: Residual | None = None
    shows_from: int | None = None
    drafts: tuple[int, ...] = ()
    restores: bool = False


@dataclass(slots=True, eq=False)
class Observation:
    """What a pass showed. `key_change` and `value_change`: float32 `[rows]`, squared L2 of fresh against cached.

    `key_norm` and `value_norm`: float32 `[rows]`, squared L2 of the cached ones themselves. `attention`: float32
    `[prompt tokens]`, see `engine.attention.base.attend_scored`. `sensitivity`: float32 `[prompt tokens]`, summed over
    the layers loaded so far, NaN where a segment was stored without (see `engine.contrast`); None where all were.
    `logits`: float32 `[shown rows, vocab_size]` where the pass shows any.
    """

    rows: torch.Tensor
    key_change: torch.Tensor | None = None
    value_change: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    value_norm: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    sensitivity: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SelectionContext:
    """What a selector knows beforehand: positions (int64, CPU, ascending) and the budget.

    `cached_rows` are the B-rows, `cached_spans` the `(start, end)` of the segments they belong to, `fresh_rows` what
    must be computed in any case (question, misses, text between), `question_rows` the last segment. Exact rows are in
    none of them. `slots` is how many positions the sequence has room for.
    """

    num_layers: int
    num_tokens: int
    cached_rows: torch.Tensor
    fresh_rows: torch.Tensor
    question_rows: torch.Tensor
    budget: int
    cached_spans: tuple[tuple[int, int], ...] = ()
    slots: int = 0


Passes = Generator[Pass, Observation, None]


class Selector(Protocol):
    """One way of choosing which cached rows are computed again."""

    name: str

    def passes(self, context: SelectionContext) -> Passes:
        """Yield passes, receiving each one's Observation; the last pass must hold the prompt's last row."""
        ...


def merge_rows(*parts: torch.Tensor) -> torch.Tensor:
    """Positions of all parts (disjoint), ascending."""
    return torch.cat(parts).sort().values


def top_rows(rows: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` of `rows` with the largest score, ascending; ties fall to the earlier position."""
    if count >= rows.shape[0]:
        return rows
    # a stable descending sort keeps equal scores in position order, where topk promises nothing
    order = scores.sort(descending=True, stable=True).indices[:count]
    return rows[order].sort().values


def plain_pass(context: SelectionContext) -> Pass:
    """All layers for the rows that are fresh in any case: what every selector runs where it may choose nothing."""
    return Pass(range(context.num_layers), context.fresh_rows)


def build_residual(spec: SelectorSpec, context: SelectionContext, chosen: torch.Tensor) -> Residual | None:
    """What corrects the cached rows outside `chosen` by those inside; None where nothing is wanted, seen or left."""
    kind = None if spec.residual == "none" or not chosen.numel() else spec.residual
    return Residual.build(kind, spec.residual_fraction, context.cached_spans, context.cached_rows, chosen)
