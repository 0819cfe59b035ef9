"""From a planned job to what the engine's runner needs: selector, sampling, text output."""

from __future__ import annotations

from dataclasses import replace

from kvblend.actors.core.events import Job
from kvblend.actors.selection import merge_selection
from kvblend.actors.settings import Settings
from kvblend.engine.layout import BlendPlan
from kvblend.engine.output import OutputText
from kvblend.engine.runner import SequenceSpec
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.sequence import LayerSource
from kvblend.engine.tokenizer import Tokenizer


class SpecBuilder:
    """Builds sequence specs under one server's settings."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer

    def build(self, job: Job, plan: BlendPlan, captures: tuple[int, ...], source: LayerSource) -> SequenceSpec:
        """The spec of one job. Work for a plan without budget needs no selection."""
        if job.kind == "precompute":
            spec = SequenceSpec(job.request_id, plan, PlainSelector(), job.tokens_max, source, captures)
            chunk = len(plan.layout.segments) - 1
            two = job.conditioning == "warm" and chunk in captures
            return replace(spec, contrast=chunk - 1) if two else spec
        sampling = job.sampling
        return SequenceSpec(
            job.request_id,
            plan,
            self._selector(job, plan),
            job.tokens_max,
            source,
            captures,
            SamplingPlan(sampling.temperature, sampling.top_p, sampling.seed or 0),
            OutputText(self._tokenizer.stream(), self._tokenizer.eos_ids, sampling.stop, sampling.max_tokens),
        )

    def _selector(self, job: Job, plan: BlendPlan) -> Selector:
        if plan.budget == 0:
            return PlainSelector()
        return build_selector(merge_selection(self._settings, job.options))
