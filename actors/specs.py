"""From a planned job to what the engine's runner needs: selector, sampling, text output."""

from __future__ import annotations

from kvblend.actors.core.events import Job
from kvblend.actors.settings import Settings
from kvblend.engine.layout import BlendPlan
from kvblend.engine.output import OutputText
from kvblend.engine.runner import SequenceSpec
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.query import QuerySelector
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
            return SequenceSpec(job.request_id, plan, PlainSelector(), job.tokens_max, source, captures)
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
        settings, options = self._settings, job.options
        wanted = options.residual or settings.residual
        residual = None if wanted == "none" else wanted
        if (options.selector or settings.selector) == "query":
            return QuerySelector(residual=residual)
        return DivergenceSelector(settings.check_layer, options.divergence or settings.divergence, residual)
