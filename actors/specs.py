"""From a planned job to what the engine's runner needs: selector, sampling, text output."""

from __future__ import annotations

from dataclasses import replace

from kvblend.actors.bounds import KLBounds
from kvblend.actors.core.events import Job
from kvblend.actors.messages import Sampling
from kvblend.actors.selection import merge_selection
from kvblend.actors.settings import Settings
from kvblend.engine.bound import UNKNOWN
from kvblend.engine.layout import BlendPlan, Reuse
from kvblend.engine.output import OutputText
from kvblend.engine.payloads import LayerSource
from kvblend.engine.runner import SequenceSpec
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.bounded import BoundedSelector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.tokenizer import Tokenizer


class SpecBuilder:
    """Builds sequence specs under one server's settings. `bounds` has the estimates of requests with `max_kl`."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, bounds: KLBounds | None = None) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._bounds = bounds

    def build(self, job: Job, plan: BlendPlan, captures: tuple[int, ...], source: LayerSource) -> SequenceSpec:
        """The spec of one job. Work for a plan without budget needs no selection."""
        if job.kind == "precompute":
            spec = SequenceSpec(job.request_id, plan, PlainSelector(), job.tokens_max, source, captures)
            chunk = len(plan.layout.segments) - 1
            two = job.conditioning == "warm" and chunk in captures
            return replace(spec, contrast=chunk - 1, echo=job.echo) if two else spec
        sampling = job.sampling
        return SequenceSpec(
            job.request_id,
            plan,
            self._selector(job, plan),
            job.tokens_max,
            source,
            captures,
            self._plan(sampling),
            OutputText(
                self._tokenizer.stream(),
                self._ends(sampling),
                sampling.stop,
                sampling.max_tokens,
                sampling.min_tokens,
                self._tokenizer,
            ),
        )

    def _ends(self, sampling: Sampling) -> tuple[int, ...]:
        """The tokens that end an answer."""
        own = () if sampling.ignore_eos else self._tokenizer.eos_ids
        return (*own, *sampling.stop_token_ids)

    def _plan(self, sampling: Sampling) -> SamplingPlan:
        return SamplingPlan(
            sampling.temperature,
            sampling.top_p,
            sampling.seed or 0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            min_tokens=sampling.min_tokens,
            end_ids=self._ends(sampling),
            logprobs=sampling.logprobs,
        )

    def _selector(self, job: Job, plan: BlendPlan) -> Selector:
        spec, kl_max = merge_selection(self._settings, job.options), job.options.max_kl
        if kl_max is not None and job.mode == "blend" and plan.count(Reuse.CACHED):
            model = None if self._bounds is None else self._bounds.model_for(spec)
            # without an estimate nothing but a full prefill is sure to hold
            ratio, model = (1.0, UNKNOWN) if model is None else (plan.recompute_ratio, model)
            return BoundedSelector(spec, ratio, kl_max, model, self._tokenizer.eos_ids)
        if plan.budget == 0:
            return PlainSelector()
        return build_selector(spec)
