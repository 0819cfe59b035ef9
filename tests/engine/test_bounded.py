"""Raising the ratio until a bound holds: every try is the blend it would have been alone, the last one is full."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from blends import QUESTION, A, B, C, assert_equal, blend, prompt
from tiny_models import Bench, tiny_model

from kvblend.engine.bound import KLModel
from kvblend.engine.selectors.bounded import BoundedSelector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.spec import KL_POSITIONS, SelectorSpec

LAYOUT = prompt([A, B, C])
QUESTION_ROWS = len(QUESTION)
SPECS = [
    SelectorSpec(),
    SelectorSpec(check_layers=(1, 2), residual="mean"),
    SelectorSpec("query", probes=0.25, residual="distance"),
    SelectorSpec("sensitive", residual="mean"),
    SelectorSpec("union"),
    SelectorSpec("random", residual="ridge"),
]
# judges by the ratio alone: 0.55 at 0.15, 0.30 at 0.3, 0.14 at 0.5
MODEL = KLModel(level=0.0, slope=0.0, per_ratio=-4.0, per_entropy=0.0, margin=0.0, spread=0.0, samples=1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(tiny_model())


def bounded(
    kl_max: float, spec: SelectorSpec = SPECS[0], ratio: float = 0.15, eos: Sequence[int] = ()
) -> BoundedSelector:
    return BoundedSelector(spec, ratio, kl_max, MODEL, eos)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.selector)
@pytest.mark.parametrize(("kl_max", "ratio"), [(1.0, 0.15), (0.4, 0.3), (0.25, 0.5)])
def test_a_raised_blend_is_the_one_that_its_ratio_gives(
    bench: Bench, spec: SelectorSpec, kl_max: float, ratio: float
) -> None:
    selector = bounded(kl_max, spec)
    got = blend(bench, LAYOUT, ratio=0.15, selector=selector)
    assert selector.ratio == ratio
    assert_equal(got, blend(bench, LAYOUT, ratio=ratio, selector=build_selector(spec)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.selector)
@pytest.mark.parametrize("rows_max", [1 << 30, 17])
def test_a_bound_that_nothing_holds_ends_in_a_full_prefill(bench: Bench, spec: SelectorSpec, rows_max: int) -> None:
    selector = bounded(0.0, spec)
    got = blend(bench, LAYOUT, ratio=0.15, selector=selector, rows_max=rows_max)
    assert (selector.ratio, selector.kl_estimate) == (1.0, 0.0)
    assert_equal(got, bench.full(LAYOUT))


def test_a_chunk_that_is_missing_is_computed_all_the_same(bench: Bench) -> None:
    got = blend(bench, LAYOUT, missing=(1,), ratio=0.15, selector=bounded(0.0))
    assert_equal(got, bench.full(LAYOUT))


def test_steps_that_cannot_be_enough_are_passed_over(bench: Bench) -> None:
    selector = bounded(0.25)
    blend(bench, LAYOUT, ratio=0.15, selector=selector)
    assert [rung.shown.ratio for rung in selector.rungs] == [0.15, 0.5]


def test_what_was_tried_in_vain_is_charged(bench: Bench) -> None:
    once = blend(bench, LAYOUT, ratio=0.15, selector=bounded(1.0)).sequence
    twice = blend(bench, LAYOUT, ratio=0.15, selector=bounded(0.0)).sequence
    # all cached rows through all layers, and the question with the draft once more
    again = (QUESTION_ROWS + KL_POSITIONS - 1) / len(twice.context.cached_rows)
    assert twice.charged_ratio == pytest.approx(once.charged_ratio + 1.0 + again)


def test_the_change_is_seen_on_a_drafted_answer(bench: Bench) -> None:
    selector = bounded(1.0)
    sequence = blend(bench, LAYOUT, ratio=0.15, selector=selector).sequence
    draft = sequence.token_ids[LAYOUT.num_tokens :][: KL_POSITIONS - 1]
    reused = blend(bench, LAYOUT, ratio=0.0)
    assert int(reused.logits.argmax()) == int(draft[0])
    assert selector.rungs[0].shown.change > 0.0
    assert 0.0 < selector.rungs[0].shown.entropy < 5.0


def test_a_draft_ends_with_the_answer(bench: Bench) -> None:
    reused = blend(bench, LAYOUT, ratio=0.0)
    sequence = blend(bench, LAYOUT, ratio=0.15, selector=bounded(1.0, eos=[int(reused.logits.argmax())])).sequence
    assert sequence.token_ids[LAYOUT.num_tokens :].tolist() == [0] * (sequence.slab.capacity - LAYOUT.num_tokens)


def test_more_rows_of_a_prompt_follow_as_they_always_do(bench: Bench) -> None:
    got = blend(bench, LAYOUT, ratio=0.15, selector=bounded(1.0)).sequence
    want = blend(bench, LAYOUT, ratio=0.15, selector=build_selector(SPECS[0])).sequence
    logits = []
    for sequence in (got, want):
        sequence.append_token(QUESTION[0])
        logits.append(bench.finish(sequence).logits)
    assert torch.allclose(logits[0], logits[1], rtol=1e-9, atol=1e-9)


def test_a_prompt_without_cached_rows_is_computed_plainly(bench: Bench) -> None:
    selector = bounded(0.0)
    got = blend(bench, LAYOUT, missing=(0, 1, 2), ratio=0.15, selector=selector)
    assert_equal(got, bench.full(LAYOUT))
    assert selector.rungs == []
