"""A selection whose share of recomputed rows is raised until the request's KL is estimated to be below a bound."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator
from dataclasses import dataclass, field, replace

import torch

from kvblend.engine.bound import KLModel, Shown, ladder, next_step
from kvblend.engine.selectors.base import Observation, Pass, Passes, SelectionContext, merge_rows, plain_pass
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.spec import KL_POSITIONS, SelectorSpec


@dataclass(frozen=True, slots=True)
class Rung:
    """One try: what it showed, and the KL it is judged by."""

    shown: Shown
    kl_limit: float


@dataclass(slots=True, eq=False)
class _Draft:
    """The answer as plain reuse would begin it, and what was thought at each of its positions so far."""

    tokens: tuple[int, ...] = ()
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class BoundedSelector:
    """Blends at the first ratio of the ladder whose estimate is at most `kl_max`; at last everything is recomputed.

    First the fresh rows run over the reused KV alone (selectors guided by the question do that anyway) and the answer's
    first tokens are drafted on it, one by one. The draft's rows go through every later pass with the others, so that
    two blends can be compared at the answer's own positions. A raise starts from the KV that was loaded: it is the
    blend that a request with that ratio would have had.
    """

    def __init__(
        self, spec: SelectorSpec, ratio: float, kl_max: float, model: KLModel, eos_ids: Collection[int] = ()
    ) -> None:
        self.name: str = spec.selector
        self.spec = spec
        self.kl_max = kl_max
        self.steps = ladder(ratio)
        self.rungs: list[Rung] = []
        self._model = model
        self._eos = frozenset(eos_ids)
        self._saved: Observation | None = None

    @property
    def ratio(self) -> float:
        """The share of cached rows that the blend used in the end; 0 where it never came to one."""
        return self.rungs[-1].shown.ratio if self.rungs else 0.0

    @property
    def kl_estimate(self) -> float:
        """What the KL is estimated not to exceed."""
        return self.rungs[-1].kl_limit if self.rungs else 0.0

    def passes(self, context: SelectionContext) -> Passes:
        """[fresh rows over reused KV][draft, a row a pass][the selector's own passes]; the last again for a raise."""
        if not context.cached_rows.numel():
            yield plain_pass(context)
            return
        self.spec.check_model(context.num_layers)
        self.rungs.clear()
        draft = yield from self._draft(context)
        before, ratio_before, ratio = draft.logits, 0.0, self.steps[0]
        while True:
            logits = yield from self._blend(context, ratio, draft)
            shown = _compare(before, logits, ratio, ratio_before)
            limit = 0.0 if ratio == 1.0 else self._model.limit(shown, self.kl_max)
            self.rungs.append(Rung(shown, limit))
            if limit <= self.kl_max:
                return
            before, ratio_before = logits, ratio
            ratio = next_step(self.steps, shown, self._model, self.kl_max)

    def _draft(self, context: SelectionContext) -> Generator[Pass, Observation, _Draft]:
        """The pass over the reused KV, then the answer's first tokens, greedily, at most to an end token."""
        first = next(build_selector(self.spec).passes(replace(context, budget=1)))
        guided = first.observe == "attention"
        seen = yield replace(first if guided else plain_pass(context), shows_from=context.num_tokens - 1)
        self._saved = seen if guided else None
        logits, tokens = [_shown(seen)], [int(_shown(seen).argmax())]
        for row in range(context.num_tokens, min(context.slots, context.num_tokens + KL_POSITIONS - 1)):
            if tokens[-1] in self._eos:
                break
            rows = torch.tensor([row])
            seen = yield Pass(range(context.num_layers), rows, shows_from=row, drafts=tuple(tokens))
            logits.append(_shown(seen))
            tokens.append(int(_shown(seen).argmax()))
        return _Draft(tuple(tokens[:-1]), torch.cat(logits))

    def _blend(
        self, context: SelectionContext, ratio: float, draft: _Draft
    ) -> Generator[Pass, Observation, torch.Tensor]:
        """One blend with the draft behind it; returns the logits at the draft's positions."""
        cached = context.cached_rows.shape[0]
        budget = min(cached, math.ceil(ratio * cached - 1e-9))
        rows = context.num_tokens + torch.arange(len(draft.tokens))
        restores = bool(self.rungs)
        if ratio == 1.0:
            everything = merge_rows(context.cached_rows, context.fresh_rows, rows)
            seen = yield self._with_draft(context, Pass(range(context.num_layers), everything), draft)
            return _shown(seen)
        spec = self.spec if not self.rungs else self.spec.overridden({}, has_ratio=True)
        passes = build_selector(spec).passes(replace(context, budget=budget))
        step = next(passes)
        if step.observe == "attention" and self._saved is not None:
            step = passes.send(self._saved)
        while True:
            given = replace(self._with_draft(context, step, draft, rows), restores=restores)
            seen, restores = (yield given), False
            try:
                step = passes.send(seen)
            except StopIteration:
                return _shown(seen)

    def _with_draft(
        self, context: SelectionContext, step: Pass, draft: _Draft, rows: torch.Tensor | None = None
    ) -> Pass:
        merged = step.rows if rows is None else merge_rows(step.rows, rows)
        last = step.layers.stop == context.num_layers and step.stop == "output"
        return replace(step, rows=merged, drafts=draft.tokens, shows_from=context.num_tokens - 1 if last else None)


def _shown(seen: Observation) -> torch.Tensor:
    if seen.logits is None:
        raise RuntimeError("the step did not show logits")
    return seen.logits


def _compare(before: torch.Tensor, after: torch.Tensor, ratio: float, ratio_before: float) -> Shown:
    """KL from `after` to `before` `[positions, vocab_size]`, and the entropy of `after`, both means over positions."""
    log_p, log_q = after.double().log_softmax(-1), before.double().log_softmax(-1)
    terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
    entropy = torch.special.entr(log_p.exp()).sum(-1).mean()
    return Shown(ratio, ratio_before, float(terms.sum(-1).clamp_min(0.0).mean()), float(entropy))
