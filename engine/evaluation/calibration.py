"""How a model's KL is estimated from what its blends show: measured on built-in probes, then fitted.

A chunk's stored KV does not depend on the prompts it will stand in. So a few chunks are computed once, and many prompts
are made of them: other chunks, another order, another question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from kvblend.engine.bound import Shown, ladder
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.evaluation.chunk_kv import ChunkKV, Payloads, Prefiller
from kvblend.engine.evaluation.forcing import Prefilled
from kvblend.engine.evaluation.metrics import entropy_per_position, kl_per_position
from kvblend.engine.evaluation.probes import CHUNKS, Dice, make_probes
from kvblend.engine.evaluation.prompting import PreparedQuestion, prepare_question
from kvblend.engine.evaluation.questions import BadData, Question
from kvblend.engine.kv import PAGE_TOKENS, SlabPool
from kvblend.engine.layout import BlendPlan, Reuse, SegmentKind
from kvblend.engine.precision import Precision
from kvblend.engine.recommended import Conditioning
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.spec import KL_POSITIONS, SelectorSpec
from kvblend.engine.step import Step
from kvblend.engine.tokenizer import Tokenizer

SEED, TEXTS, PROMPTS, WORDS = 20_260_601, 2, 16, 12
RATIO = 0.15


class Unfit(ValueError):
    """This model cannot be calibrated; the message says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One blend of prompt number `prompt`: what it showed, what its KL was, and what it was charged."""

    shown: Shown
    kl: float
    charged: float = 0.0
    prompt: int = 0


def calibration_questions(prompts: int = PROMPTS, texts: int = TEXTS, words: int = WORDS) -> list[Question]:
    """`prompts` questions over six chunks each, drawn from those of `texts` probes."""
    probes = make_probes(SEED, texts, words)
    documents = [document for probe in probes for document in probe.documents]
    found = []
    for index in range(prompts):
        asked = probes[index % len(probes)]
        found.append(Question(tuple(Dice(SEED, index).some(documents, CHUNKS)), asked.question, asked.answers))
    return found


class Calibration:
    """Blends prompts at every step of the ladder and compares with full prefills. `warm`: ids of the unrelated text."""

    def __init__(
        self,
        step: Step,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        questions: Sequence[Question],
        warm: Sequence[int],
        spec: SelectorSpec,
        conditioning: Conditioning,
        precision: Precision | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        """`keeps`: chunks stay in memory for later prompts. Raises Unfit where a prompt does not fit the context."""
        config = step.model.config
        try:
            self._prompts = [
                prepare_question(tokenizer, template, question, index, config.context_length)
                for index, question in enumerate(questions)
            ]
        except BadData as error:
            raise Unfit(f"the probes cannot be asked: {error}") from None
        head = self._prompts[0].layout.segments[0]
        system = head.token_ids if head.kind is SegmentKind.SYSTEM else ()
        longest = max(prompt.layout.num_tokens for prompt in self._prompts) + KL_POSITIONS
        chunk = max(len(segment.token_ids) for prompt in self._prompts for _, segment in prompt.layout.chunks())
        self._warms = len(system) + len(warm) + chunk <= config.context_length
        behind = len(system) + len(warm) + chunk
        pool = SlabPool(config, 2 * (max(longest, behind) + 2 * PAGE_TOKENS), step.model.dtype, step.model.device)
        self._prefiller = Prefiller(step, pool, precision)
        self._kv = ChunkKV(self._prefiller, system, warm)
        self._spec, self._conditioning = spec, conditioning
        self._eos = frozenset((*tokenizer.eos_ids, *config.eos_ids))
        self._keeps = keeps
        self._kept: dict[tuple[Conditioning, tuple[int, ...]], Payloads] = {}

    def samples(self, steps: Sequence[float] = ladder(RATIO)[:-1]) -> Iterator[Sample | None]:
        """The samples one by one; None where a piece of work is done and more is to come.

        Per prompt each of `steps` is compared with the one before it, the first with plain reuse, and the last with the
        first too, as where a raise passes over what lies between.
        """
        for index, prompt in enumerate(self._prompts):
            if not self._keeps:
                self._kept.clear()
            stored: dict[int, Payloads] = {}
            for payloads in self._store(prompt):
                stored = payloads
                yield None
            for sample in self._measure(prompt, stored, steps):
                yield None if sample is None else replace(sample, prompt=index)

    def _measure(
        self, prompt: PreparedQuestion, stored: dict[int, Payloads], steps: Sequence[float]
    ) -> Iterator[Sample | None]:
        full = self._run(prompt, None, 0.0)
        try:
            continuation = full.continue_greedily(KL_POSITIONS, self._eos)
            wanted = full.force(continuation).clone()
        finally:
            self._prefiller.release(full)
        yield None
        draft: list[int] = []
        seen: list[tuple[float, torch.Tensor]] = []
        for ratio in (0.0, *steps):
            done = self._run(prompt, stored, ratio)
            try:
                draft = draft or done.continue_greedily(KL_POSITIONS, self._eos)
                after, given = done.force(draft).clone(), done.force(continuation)
                kl, charged = fmean(kl_per_position(wanted, given)), done.state.charged_ratio
            finally:
                self._prefiller.release(done)
            entropy = fmean(entropy_per_position(after))
            earlier = seen[-1:] if ratio < steps[-1] or len(seen) < 3 else [seen[1], seen[-1]]
            for ratio_before, before in earlier:
                change = fmean(kl_per_position(after, before))
                yield Sample(Shown(ratio, ratio_before, change, entropy), kl, charged)
            seen.append((ratio, after))
            yield None

    def _store(self, prompt: PreparedQuestion) -> Iterator[dict[int, Payloads]]:
        """What a store has of the prompt, by first position; chunks that stood in earlier prompts are there already."""
        stored: dict[int, Payloads] = {}
        system = self._kv.system_payloads()
        if system is not None:
            stored[0] = system
        for place, (_, segment) in enumerate(prompt.layout.chunks()):
            # the first chunk is exact behind the system prompt
            behind: Conditioning = self._conditioning if place and self._warms else "system"
            key = (behind, segment.token_ids)
            if key not in self._kept:
                self._kept[key] = self._kv.compute(behind, segment.token_ids)
                yield stored
            stored[segment.start] = self._kept[key]
        yield stored

    def _run(self, prompt: PreparedQuestion, stored: dict[int, Payloads] | None, ratio: float) -> Prefilled:
        """Prefill over stored KV, or all of it where there is none; the caller releases it."""
        layout = prompt.layout
        marks = [Reuse.FRESH] * len(layout.segments)
        if stored is not None:
            first = next(index for index, _ in layout.chunks())
            for index in range(len(marks) - 1):
                marks[index] = Reuse.EXACT if index <= first else Reuse.CACHED
        # lists of their own would keep the selector from the ratio that is being measured
        spec = self._spec.overridden({}, has_ratio=True)
        selector = build_selector(spec) if ratio > 0.0 else PlainSelector()
        return self._prefiller.run(BlendPlan.of(layout, marks, ratio), selector, stored, (), KL_POSITIONS + 1)
