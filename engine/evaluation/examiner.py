"""Runs one question through every method and compares each with the full prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.conditioning import PASSAGES, warm_ids
from kvblend.engine.evaluation.chunk_kv import ChunkKV, KeptForms, Payloads, Prefiller, RecentForms, captured
from kvblend.engine.evaluation.forcing import Prefilled
from kvblend.engine.evaluation.methods import BASELINE, FULL, Run
from kvblend.engine.evaluation.metrics import (
    entropy_per_position,
    first_divergence,
    kl_per_position,
    negative_log_likelihood,
    top1_agreement,
)
from kvblend.engine.evaluation.prompting import GOLD_TOKENS_MAX, PreparedQuestion, instruction_ids, prepare_question
from kvblend.engine.evaluation.questions import BadData, Question
from kvblend.engine.evaluation.results import QuestionResult, RunResult
from kvblend.engine.evaluation.text_scores import score_text
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse
from kvblend.engine.loaders.load import LoadedModel
from kvblend.engine.precision import Precision
from kvblend.engine.recommended import Conditioning
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.step import Step

CONTINUATION_TOKENS = 16
_SHOWN_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """What the full prefill says: logits at gold and continuation positions, its text, its time."""

    gold: torch.Tensor
    continuation: tuple[int, ...]
    continued: torch.Tensor


class Examiner:
    """Evaluates methods on one model. `clock` gives seconds; only differences of it count.

    `passages` are `(title, text)` of the corpus, for the conditioning "corpus". `store_dtype` is the form that chunks
    are stored in; "": as computed. Where it is narrow, every blend is compared with that of chunks stored as computed.
    Forms of chunks are taken from `kept` where it has them; None: those of a question are kept in memory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        clock: Callable[[], float],
        passages: Sequence[tuple[str, str]] = (),
        store_dtype: str = "",
        kept: KeptForms | None = None,
    ) -> None:
        model = loaded.model
        self._loaded = loaded
        self._clock = clock
        # one question's prompt at a time, and one chunk behind the unrelated text
        pool = SlabPool(model.config, 4 * model.config.context_length, model.dtype, model.device)
        step, precision = Step(model, backend), Precision.of_model(model, store_dtype)
        self._prefiller = Prefiller(step, pool, precision)
        self._wide = Prefiller(step, pool) if precision.is_narrow else None
        system = instruction_ids(loaded.tokenizer, loaded.template)
        context = model.config.context_length
        warm, corpus = (warm_ids(loaded.tokenizer, context, texts) for texts in (PASSAGES, passages))
        kept = RecentForms() if kept is None else kept
        self._chunks = ChunkKV(self._prefiller, system, warm, corpus, kept)
        self._wide_chunks = ChunkKV(self._wide, system, warm, corpus, kept) if self._wide is not None else None
        self._eos = frozenset((*loaded.tokenizer.eos_ids, *model.config.eos_ids))

    def prepare(self, questions: Sequence[Question], runs: Sequence[Run]) -> list[PreparedQuestion]:
        """All questions as prompts; BadData for one that does not fit the model's context, as a prompt or for a run."""
        tokenizer, template = self._loaded.tokenizer, self._loaded.template
        limit = self._loaded.model.config.context_length
        found = [
            prepare_question(tokenizer, template, question, index, limit) for index, question in enumerate(questions)
        ]
        conditionings = {run.conditioning for run in (BASELINE, *runs) if run.conditioning is not None}
        for index, prepared in enumerate(found):
            longest = max(len(segment.token_ids) for _, segment in prepared.layout.chunks())
            for conditioning in sorted(conditionings):
                before = self._chunks.tokens_before(conditioning)
                if before + longest > limit:
                    raise BadData(
                        f"data[{index}] has a document of {longest} tokens; behind the {before} tokens of "
                        f"{conditioning} conditioning it does not fit the model's context of {limit}"
                    )
        return found

    def examine(self, prepared: PreparedQuestion, index: int, runs: Sequence[Run]) -> QuestionResult:
        """Results of `runs`, of the full prefill and of the baseline (plain reuse behind the system prompt).

        Runs that would compute the same are computed once.
        """
        layout = prepared.layout
        first = next(i for i, _ in layout.chunks())
        full, ttft_ms = self._prefill(layout, FULL, {}, captures=(first,))
        try:
            exact = captured(full, 0)
            continuation = tuple(full.continue_greedily(CONTINUATION_TOKENS, self._eos))
            reference = _Reference(full.force(prepared.gold), continuation, full.force(continuation))
            text = list(continuation)
            results = [self._result(prepared, FULL, full, ttft_ms, reference, (reference.continued, text))]
        finally:
            self._prefiller.release(full)
        texts: list[Sequence[int]] = []
        payloads: dict[Conditioning, dict[int, Payloads]] = {}
        wide: dict[Conditioning, dict[int, Payloads]] = {}
        done: dict[tuple[object, ...], RunResult] = {}
        for run in dict.fromkeys((BASELINE, *runs)):
            if run.conditioning is None:
                continue
            if run.work not in done:
                if run.conditioning not in payloads:
                    payloads[run.conditioning] = self._payloads(self._chunks, layout, run.conditioning, exact)
                    if self._wide_chunks is not None:
                        wide[run.conditioning] = self._payloads(self._wide_chunks, layout, run.conditioning, exact)
                unrounded = self._unrounded_gold(prepared, run, wide.get(run.conditioning))
                loaded = payloads[run.conditioning]
                done[run.work] = self._examine_run(prepared, run, loaded, reference, texts, unrounded)
            results.append(replace(done[run.work], method=run.method, ratio=run.ratio))
        return QuestionResult(index, tuple(results))

    def _examine_run(
        self,
        prepared: PreparedQuestion,
        run: Run,
        payloads: dict[int, Payloads],
        reference: _Reference,
        texts: list[Sequence[int]],
        unrounded: torch.Tensor | None,
    ) -> RunResult:
        blend, ttft_ms = self._prefill(prepared.layout, run, payloads)
        try:
            followed = blend.follow(reference.continuation, CONTINUATION_TOKENS, self._eos, texts)
            # another method's text is a good guess at this one's once both have left the full prefill's
            texts.insert(0, followed[1])
            return self._result(prepared, run, blend, ttft_ms, reference, followed, unrounded)
        finally:
            self._prefiller.release(blend)

    def _unrounded_gold(
        self, prepared: PreparedQuestion, run: Run, payloads: dict[int, Payloads] | None
    ) -> torch.Tensor | None:
        """Logits over the gold answer from chunks stored as computed; None where they are stored so anyway."""
        if self._wide is None or payloads is None:
            return None
        done, _ = self._prefill(prepared.layout, run, payloads, by=self._wide)
        try:
            return done.force(prepared.gold).clone()
        finally:
            self._wide.release(done)

    def _payloads(
        self, chunks: ChunkKV, layout: PromptLayout, conditioning: Conditioning, exact: Payloads
    ) -> dict[int, Payloads]:
        """The KV of everything before the question: the first chunk's exact one, the others' behind `conditioning`.

        `exact` is as computed, what comes back is in the form that `chunks` has.
        """
        system = chunks.system_payloads()
        found = {0: system} if system is not None else {}
        for number, (_, segment) in enumerate(layout.chunks()):
            ids = segment.token_ids
            found[segment.start] = chunks.compute(conditioning, ids) if number else chunks.store(exact, len(ids))
        return found

    def _prefill(
        self,
        layout: PromptLayout,
        run: Run,
        payloads: dict[int, Payloads],
        captures: tuple[int, ...] = (),
        by: Prefiller | None = None,
    ) -> tuple[Prefilled, float]:
        """The prefilled prompt, and the milliseconds that it took. `by` takes payloads of another form."""
        chunks = [i for i, _ in layout.chunks()]
        marks = [Reuse.EXACT if i <= chunks[0] else Reuse.CACHED for i in range(chunks[-1] + 1)]
        marks += [Reuse.FRESH] * (len(layout.segments) - len(marks))
        if run.conditioning is None:
            marks = [Reuse.FRESH] * len(marks)
        selector = PlainSelector() if run.spec is None else build_selector(run.spec)
        extra = max(CONTINUATION_TOKENS, GOLD_TOKENS_MAX)
        began = self._clock()
        plan = BlendPlan.of(layout, marks, run.plan_ratio if run.spec is not None else 0.0)
        done = (by or self._prefiller).run(plan, selector, payloads, captures, extra)
        return done, 1e3 * (self._clock() - began)

    def _result(
        self,
        prepared: PreparedQuestion,
        run: Run,
        done: Prefilled,
        ttft_ms: float,
        reference: _Reference,
        followed: tuple[torch.Tensor, list[int]],
        unrounded: torch.Tensor | None = None,
    ) -> RunResult:
        is_full = run.conditioning is None
        gold = reference.gold if is_full else done.force(prepared.gold)
        continued, text = followed
        answer = self._loaded.tokenizer.decode(text).strip()
        scores = score_text(answer, prepared.question.answers)
        return RunResult(
            method=run.method,
            ratio=run.ratio,
            kl=tuple(kl_per_position(reference.gold, gold)),
            kl_cont=tuple(kl_per_position(reference.continued, continued)),
            nll=negative_log_likelihood(gold, prepared.gold),
            nll_full=negative_log_likelihood(reference.gold, prepared.gold),
            top1=top1_agreement(reference.gold, gold),
            f1=scores.f1,
            em=scores.em,
            rouge_l=scores.rouge_l,
            answer=answer,
            first_divergence=first_divergence(reference.continuation, text),
            ttft_ms=ttft_ms,
            charged_ratio=done.state.charged_ratio,
            estimates=_estimates(done, continued),
            kl_store=() if unrounded is None else tuple(kl_per_position(unrounded, gold)),
        )


def _estimates(done: Prefilled, continued: torch.Tensor) -> dict[str, Any]:
    """What a request could see of itself: the likeliest first tokens with log-probabilities, entropies, layer 0."""
    top = done.first.double().log_softmax(-1).topk(min(_SHOWN_TOKENS, done.first.shape[0]))
    return {
        "first_tokens": top.indices.tolist(),
        "first_log_probabilities": top.values.tolist(),
        "entropy_cont": entropy_per_position(continued),
        "parity_error": done.state.parity_error,
        "cached_rows": int(done.state.context.cached_rows.shape[0]),
        "budget": done.state.plan.budget,
    }
