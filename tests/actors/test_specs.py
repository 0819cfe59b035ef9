"""What the runner is told: the request's own options before the server's, and nothing chosen without a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_driver import A, B, generate, store
from model_files import tokenizer_json

from kvblend.actors.core.events import Job
from kvblend.actors.core.planning import storing_layout
from kvblend.actors.messages import BlendOptions, Sampling, SelectionOptions
from kvblend.actors.settings import Settings
from kvblend.actors.specs import SpecBuilder
from kvblend.actors.tables import RequestLayers
from kvblend.engine.choosing import Choice
from kvblend.engine.layout import BlendPlan, Reuse
from kvblend.engine.runner import SequenceSpec
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.tokenizer import Tokenizer
from kvblend.store.keys import ChunkKey

REUSE = (Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH)


def built(
    job: Job | None = None, ratio: float = 0.5, captures: tuple[int, ...] = (1,), **settings: Any
) -> SequenceSpec:
    """The spec of a job (by default of system, two chunks and a question, of which the second chunk is cached)."""
    job = job or asking()
    tokenizer = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)
    reuse = REUSE if job.kind == "generate" else (Reuse.FRESH,) * len(job.layout.segments)
    plan = BlendPlan.of(job.layout, reuse, ratio)
    return SpecBuilder(Settings(**settings), tokenizer).build(job, plan, captures, RequestLayers())


def asking(sampling: Sampling | None = None, **options: Any) -> Job:
    return replace(
        generate("r", A, B),
        options=BlendOptions(selection=SelectionOptions(**options)),
        sampling=sampling or Sampling(max_tokens=3),
    )


@pytest.mark.parametrize(
    ("wanted", "setting", "kind"),
    [
        (None, "divergence", DivergenceSelector),
        (None, "query", QuerySelector),
        ("query", "divergence", QuerySelector),
        ("divergence", "query", DivergenceSelector),
    ],
)
def test_the_selector_is_the_requests_or_the_servers(wanted: str | None, setting: str, kind: type) -> None:
    assert type(built(asking(selector=wanted), selector=setting).selector) is kind


def test_the_selector_is_built_from_the_merged_fields() -> None:
    selector = built(asking(sinks=2, divergence="kv"), divergence="v", residual="ridge").selector
    assert isinstance(selector, DivergenceSelector)
    assert selector.spec == SelectorSpec(divergence="kv", sinks=2, residual="ridge")


def test_without_a_budget_nothing_is_selected() -> None:
    assert isinstance(built(ratio=0.0).selector, PlainSelector)


def test_a_precompute_job_selects_and_samples_nothing() -> None:
    spec = built(store("s", A))
    assert isinstance(spec.selector, PlainSelector)
    assert (spec.output, spec.sampling) == (None, None)


@pytest.mark.parametrize(
    ("conditioning", "captures", "left_out"),
    [("warm", (2,), 1), ("warm", (1,), None), ("system", (2,), None), ("neighbours", (2,), None)],
)
def test_a_chunk_that_is_stored_warm_is_computed_without_the_warm_text_too(
    conditioning: str, captures: tuple[int, ...], left_out: int | None
) -> None:
    key = ChunkKey.of("m", "", (1, 2, 3), A)
    layout, keys = storing_layout(((1,), (2, 3)), A, key, 2)
    job = Job("s", "precompute", layout, keys, "blend", 0.0, BlendOptions(), Sampling(), conditioning=conditioning)
    assert built(job, captures=captures).contrast == left_out


def test_sampling_is_that_of_the_request() -> None:
    spec = built(asking(Sampling(max_tokens=3, temperature=0.5, top_p=0.9, seed=7)))
    assert spec.sampling == SamplingPlan(0.5, 0.9, 7, end_ids=(2,))


def test_every_sampling_field_reaches_the_plan() -> None:
    wanted = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    more = {"min_tokens": 2, "logprobs": 3}
    spec = built(asking(Sampling(max_tokens=3, seed=7, stop_token_ids=(9,), **wanted, **more)))  # type: ignore[arg-type]
    assert spec.sampling == SamplingPlan(0.0, 1.0, 7, end_ids=(2, 9), **wanted, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "token", "stops"),
    [
        (Sampling(), 2, True),
        (Sampling(ignore_eos=True), 2, False),
        (Sampling(ignore_eos=True, stop_token_ids=(2,)), 2, True),
        (Sampling(stop_token_ids=(70,)), 70, True),
        (Sampling(), 70, False),
    ],
)
def test_the_answer_ends_at_the_models_end_and_at_tokens_asked_for(sampling: Sampling, token: int, stops: bool) -> None:
    output = built(asking(sampling)).output
    assert output is not None
    assert output.push(token).stopped == stops


def test_log_probabilities_have_names() -> None:
    output = built(asking(Sampling(logprobs=0))).output
    assert output is not None
    told = output.describe(Choice(70, -1.0))
    assert told is not None
    assert told.bytes is not None


def test_slots_are_reserved_for_prompt_and_answer() -> None:
    job = asking()
    assert built(job).tokens_max == job.layout.num_tokens + 3


def test_stop_strings_reach_the_output() -> None:
    output = built(asking(Sampling(max_tokens=9, stop=("a",)))).output
    token = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False).encode("a", special=False)[0]
    assert output is not None
    assert output.push(token).stopped


def test_captures_and_layers_are_handed_through() -> None:
    spec = built()
    assert spec.captures == (1,)
    assert isinstance(spec.source, RequestLayers)
