"""What passes show: attention scores come from the question's rows alone, and observing changes no result."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from tiny_models import Bench, DictSource, Run, random_ids, tiny_model

from kvblend.engine.layout import PromptLayout, Reuse, SegmentKind
from kvblend.engine.observing import check_parity
from kvblend.engine.precision import Precision
from kvblend.engine.selectors.base import Observation, Pass, Passes, SelectionContext
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.selectors.spec import ResidualName, SelectorSpec
from kvblend.engine.sequence import Slice

KIND = SegmentKind
SYSTEM, A, B, C = (random_ids(n, 30 + n) for n in (6, 17, 21, 12))
QUESTION = random_ids(7, 3)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(tiny_model())


class Watching:
    """One scored pass over the fresh rows."""

    name = "watching"

    def __init__(self, observe: str = "attention") -> None:
        self.observe = observe
        self.seen: Observation | None = None

    def passes(self, context: SelectionContext) -> Passes:
        self.seen = yield Pass(range(context.num_layers), context.fresh_rows, observe=self.observe)  # type: ignore[arg-type]


def run(bench: Bench, selector: Watching | QuerySelector, ratio: float = 0.0, missing: bool = True) -> Run:
    chunks = [(KIND.CHUNK, ids) for ids in (A, B, C)]
    layout = PromptLayout.of([(KIND.SYSTEM, SYSTEM), *chunks, (KIND.QUESTION, QUESTION)])
    payloads = {
        layout.segments[0].start: bench.payloads((), SYSTEM),
        layout.segments[1].start: bench.payloads(SYSTEM, A),
        layout.segments[2].start: bench.payloads(SYSTEM, B),
    }
    last = Reuse.FRESH
    if not missing:
        payloads[layout.segments[3].start], last = bench.payloads(SYSTEM, C), Reuse.CACHED
    reuse = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, last, Reuse.FRESH]
    return bench.finish(bench.start(layout, reuse, ratio, selector, DictSource(payloads)))


def test_observing_attention_changes_no_result(bench: Bench) -> None:
    watched, plain = run(bench, Watching()), run(bench, Watching("nothing"))
    # the scored weights are float32
    assert torch.allclose(watched.k, plain.k, rtol=0, atol=1e-4)
    assert torch.allclose(watched.logits, plain.logits, rtol=0, atol=1e-4)


def test_scores_count_the_question_and_not_a_missed_chunk(bench: Bench) -> None:
    selector = Watching()
    sequence = run(bench, selector).sequence
    assert selector.seen is not None
    assert selector.seen.attention is not None
    # every question row spends a weight of 1 per head and layer, on keys whose V has some norm
    norms = sequence.slab.v[:, :, : sequence.num_prompt_tokens].norm(dim=-1).mean(1)
    total = float(selector.seen.attention.sum())
    rows_layers_heads = len(QUESTION) * 4 * 6
    assert rows_layers_heads * float(norms.min()) < total < rows_layers_heads * float(norms.max())


@pytest.mark.parametrize("residual", get_args(ResidualName))
@pytest.mark.parametrize("missing", [False, True])
def test_question_guided_at_ratio_one_equals_full_prefill(bench: Bench, residual: ResidualName, missing: bool) -> None:
    got = run(bench, QuerySelector(SelectorSpec("query", residual=residual)), ratio=1.0, missing=missing)
    want = bench.full(got.sequence.plan.layout)
    assert torch.allclose(got.k, want.k, rtol=0, atol=1e-9)
    assert torch.allclose(got.logits, want.logits, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("stored", "seen"), [("float32", 0.05), ("int8", 0.0005)])
def test_rounding_is_measured_by_the_largest_key_even_in_another_slice(stored: str, seen: float) -> None:
    model = tiny_model(dtype=torch.float32)
    bench = Bench(model)
    layout = PromptLayout.of([(KIND.CHUNK, A), (KIND.QUESTION, QUESTION)])
    sequence = bench.start(layout, [Reuse.CACHED, Reuse.FRESH], 1.0, QuerySelector(), DictSource({}))
    sequence.precision = Precision.of_model(model, stored)
    fresh = torch.ones(4, model.config.num_kv_heads, model.config.head_dim)
    sequence.slab.k[0] = 0.95
    sequence.slab.k[0, 0, len(A) - 1, 0] = 100.0
    rows = torch.arange(4)
    check_parity(sequence, Slice(rows, rows, 0, torch.empty(4, 1), None), fresh)
    assert sequence.parity_error == pytest.approx(seen, rel=1e-3)
