"""The device step: blended prefills against full ones, sparse rows, slices, packing, stalls, cancels."""

from __future__ import annotations

import pytest
import torch
from blends import LAYOUTS, QUESTION, SYSTEM, A, B, C, D, assert_equal, blend, prompt
from tiny_models import Bench, DictSource, random_ids, tiny_config, tiny_model

from kvblend.engine.config import RopeConfig
from kvblend.engine.layout import PromptLayout, Reuse
from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, Selector, merge_rows, top_rows
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.step import WorkItem


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(tiny_model())


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ratio_one_equals_full_prefill(bench: Bench, name: str, bare: bool) -> None:
    layout, missing = LAYOUTS[name]
    assert_equal(blend(bench, layout, missing, bare=bare), bench.full(layout))


@pytest.mark.parametrize("rope", ["default", "llama3"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 2)])
def test_ratio_one_equals_full_prefill_for_every_head_layout(rope: str, heads: int, kv_heads: int) -> None:
    scaled = RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 32) if rope == "llama3" else RopeConfig(500.0)
    config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, rope=scaled, attention_bias=True, mlp_bias=True)
    bench = Bench(tiny_model(config, seed=5))
    layout = prompt([C, A, B])
    assert_equal(blend(bench, layout), bench.full(layout))


def test_cached_keys_are_wrong_without_recomputing(bench: Bench) -> None:
    layout = prompt([C, A, B])
    reused, full = blend(bench, layout, ratio=0.0), bench.full(layout)
    assert (reused.logits - full.logits).abs().max() > 1e-3 * full.logits.abs().max()


def test_more_budget_brings_the_logits_closer(bench: Bench) -> None:
    layout = prompt([C, A, B, D])
    full = bench.full(layout).logits
    errors = [float((blend(bench, layout, ratio=r).logits - full).norm()) for r in (0.0, 0.9)]
    assert errors[1] < errors[0]


def test_the_exact_first_chunk_is_never_recomputed(bench: Bench) -> None:
    layout = prompt([A, B])
    run = blend(bench, layout, ratio=0.5)
    first = layout.segments[1]
    fresh = bench.full(layout)
    cached_k = run.k[:, :, : first.end]
    assert torch.allclose(cached_k, fresh.k[:, :, : first.end], rtol=0, atol=1e-12)
    assert run.sequence.context.cached_rows.tolist() == list(range(layout.segments[2].start, layout.segments[2].end))


def test_layer_zero_keys_from_the_store_equal_fresh_ones(bench: Bench) -> None:
    run = blend(bench, prompt([C, A, B]), ratio=0.3)
    assert 0.0 <= run.sequence.parity_error < 1e-12


def test_keys_stored_at_a_wrong_place_show_in_the_parity_check(bench: Bench) -> None:
    layout = prompt([C, A])
    second = layout.segments[2]
    payloads = {0: bench.payloads((), SYSTEM), layout.segments[1].start: bench.payloads(SYSTEM, C)}
    payloads[second.start] = bench.payloads(SYSTEM, random_ids(len(A), 77))
    reuse = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH]
    run = bench.finish(bench.start(layout, reuse, 0.5, DivergenceSelector(), DictSource(payloads)))
    assert run.sequence.parity_error > 0.1


def test_ratio_zero_computes_the_question_only(bench: Bench) -> None:
    run = blend(bench, prompt([C, A, B]), ratio=0.0)
    assert run.sequence.charges.cached_row_layers == 0
    assert run.sequence.charged_ratio == 0.0
    assert run.sequence.count_tokens() == (len(SYSTEM) + len(A) + len(B) + len(C), 0, len(QUESTION))


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.5, 1.0])
def test_charged_ratio_of_divergence_follows_its_formula(bench: Bench, ratio: float) -> None:
    run = blend(bench, prompt([C, A, B]), ratio=ratio)
    layers, cached = run.sequence.num_layers, len(A) + len(B)
    chosen = run.sequence.plan.budget
    assert run.sequence.charged_ratio == pytest.approx((2 * cached + (layers - 2) * chosen) / (layers * cached))


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_token_counts_add_up(bench: Bench, ratio: float) -> None:
    layout = prompt([C, A, B, D])
    run = blend(bench, layout, missing=(2,), ratio=ratio)
    reused, recomputed, fresh = run.sequence.count_tokens()
    assert reused + recomputed + fresh == layout.num_tokens
    assert recomputed == run.sequence.plan.budget
    assert fresh == len(B) + len(QUESTION)


@pytest.mark.parametrize("rows_max", [1, 7, 30])
def test_slices_of_rows_change_nothing(bench: Bench, rows_max: int) -> None:
    layout = prompt([C, A, B])
    whole, cut = blend(bench, layout, ratio=0.4), blend(bench, layout, ratio=0.4, rows_max=rows_max)
    assert_equal(cut, whole)
    assert_equal(bench.full(layout, rows_max), bench.full(layout))


def test_packed_sequences_equal_single_ones(bench: Bench) -> None:
    layouts = [prompt([C, A, B]), prompt([B, D]), prompt([A])]
    want = [bench.full(layout).logits for layout in layouts]
    reuse = [[Reuse.FRESH] * len(layout.segments) for layout in layouts]
    running = [bench.start(lay, r, 0.0, PlainSelector()) for lay, r in zip(layouts, reuse, strict=True)]
    outcomes = bench.step.run([WorkItem(sequence, 1 << 30) for sequence in running])
    for outcome, logits in zip(outcomes, want, strict=True):
        assert outcome.hidden is not None
        assert torch.allclose(bench.model.logits(outcome.hidden[None])[0], logits, rtol=0, atol=1e-9)


def test_a_decode_row_beside_a_blend_equals_a_longer_prefill(bench: Bench) -> None:
    first = bench.full(prompt([A]))
    token = int(first.logits.argmax())
    first.sequence.append_token(token)
    layout = prompt([B, C])
    other = bench.start(layout, [Reuse.FRESH] * 4, 0.0, PlainSelector())
    outcomes = bench.step.run([WorkItem(first.sequence, 1), WorkItem(other, 1 << 30)])
    want = bench.full(prompt([A], (*QUESTION, token)))
    assert outcomes[0].hidden is not None
    assert torch.allclose(bench.model.logits(outcomes[0].hidden[None])[0], want.logits, rtol=0, atol=1e-9)


def stored_source(bench: Bench, layout: PromptLayout, ready: int) -> tuple[DictSource, list[Reuse]]:
    """System prompt and two chunks from the store, of which so many layers are loaded; and what they are reused as."""
    payloads = {0: bench.payloads((), SYSTEM)}
    payloads |= {segment.start: bench.payloads(SYSTEM, segment.token_ids) for _, segment in layout.chunks()}
    return DictSource(payloads, ready), [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH]


def test_a_layer_that_is_not_loaded_stalls_and_goes_on_later(bench: Bench) -> None:
    layout = prompt([C, A])
    source, reuse = stored_source(bench, layout, ready=2)
    sequence = bench.start(layout, reuse, 0.3, DivergenceSelector(), source)
    outcome = bench.step.run([WorkItem(sequence, 1 << 30)])[0]
    assert (outcome.status, outcome.layer) == ("stalled", 2)
    source.ready = 1 << 30
    assert_equal(bench.finish(sequence), blend(bench, layout, ratio=0.3))


@pytest.mark.parametrize("rows_max", [1 << 30, 5])
@pytest.mark.parametrize("selector", [DivergenceSelector, QuerySelector])
def test_rows_are_projected_before_the_stored_layer_is_there_and_only_once(
    bench: Bench, rows_max: int, selector: type[Selector]
) -> None:
    layout = prompt([C, A])
    source, reuse = stored_source(bench, layout, ready=0)
    sequence = bench.start(layout, reuse, 0.3, selector(), source)
    row_layers = 0
    while True:
        outcome = bench.step.run([WorkItem(sequence, rows_max)])[0]
        row_layers += outcome.row_layers
        if outcome.status == "last_row":
            break
        if outcome.status == "stalled":
            assert outcome.layer == source.ready
            assert sequence.slice is not None
            assert sequence.slice.q is not None
            source.ready += 1
    untroubled = blend(bench, layout, ratio=0.3, selector=selector(), rows_max=rows_max)
    assert torch.equal(sequence.slab.k[:, :, : layout.num_tokens], untroubled.k)
    assert torch.equal(sequence.slab.v[:, :, : layout.num_tokens], untroubled.v)
    assert sequence.charged_ratio == untroubled.sequence.charged_ratio
    assert row_layers == bench.row_layers(layout, reuse, source, selector(), rows_max)


def test_a_layer_counts_when_its_rows_are_written_not_when_they_are_projected(bench: Bench) -> None:
    layout = prompt([C])
    source = DictSource({0: bench.payloads((), SYSTEM), layout.segments[1].start: bench.payloads(SYSTEM, C)}, ready=0)
    sequence = bench.start(layout, [Reuse.EXACT, Reuse.EXACT, Reuse.FRESH], 0.0, PlainSelector(), source)
    (waiting,) = bench.step.run([WorkItem(sequence, 1 << 30, 2)])
    source.ready = 1 << 30
    (gone_on,) = bench.step.run([WorkItem(sequence, 1 << 30, 2)])
    assert sequence.slice is not None
    assert sequence.slice.layer == 2
    assert [(outcome.status, outcome.row_layers) for outcome in (waiting, gone_on)] == [
        ("stalled", 0),
        ("running", 2 * len(QUESTION)),
    ]


def test_a_stalled_sequence_holds_nobody_back(bench: Bench) -> None:
    layout = prompt([C, A])
    stuck = bench.start(layout, [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH], 0.3, DivergenceSelector(),
                        DictSource({}, ready=0))  # fmt: skip
    free = bench.start(prompt([B]), [Reuse.FRESH] * 3, 0.0, PlainSelector())
    outcomes = bench.step.run([WorkItem(stuck, 1 << 30), WorkItem(free, 1 << 30)])
    assert [outcome.status for outcome in outcomes] == ["stalled", "last_row"]


def test_a_limit_of_layers_ends_the_tick_and_changes_nothing(bench: Bench) -> None:
    layout = prompt([C, A])
    sequence = bench.start(layout, [Reuse.FRESH] * 4, 0.0, PlainSelector())
    for layers_max, layer in ((2, 2), (1, 3)):
        outcome = bench.step.run([WorkItem(sequence, 1 << 30, layers_max)])[0]
        assert outcome.status == "running"
        assert sequence.slice is not None
        assert sequence.slice.layer == layer
    assert_equal(bench.finish(sequence), bench.full(layout))


def test_a_cancelled_sequence_is_left_out(bench: Bench) -> None:
    sequence = bench.start(prompt([A]), [Reuse.FRESH] * 3, 0.0, PlainSelector())
    sequence.cancelled = True
    assert bench.step.run([WorkItem(sequence, 1 << 30)])[0].status == "cancelled"


class TwoPassSelector:
    """Scores by the question's attention over reused KV in a first pass, computes the best rows in a second one."""

    name = "two-pass"

    def __init__(self) -> None:
        self.scores: torch.Tensor | None = None

    def passes(self, context: SelectionContext) -> Passes:
        seen = yield Pass(range(context.num_layers), context.question_rows, observe="attention")
        assert seen.attention is not None
        self.scores = seen.attention
        chosen = top_rows(context.cached_rows, seen.attention[context.cached_rows], context.budget)
        yield Pass(range(context.num_layers), merge_rows(chosen, context.fresh_rows))


def test_a_two_pass_selector_at_ratio_one_equals_full_prefill(bench: Bench) -> None:
    layout = prompt([C, A, B])
    selector = TwoPassSelector()
    run = blend(bench, layout, selector=selector)
    assert_equal(run, bench.full(layout))
    assert selector.scores is not None
    assert selector.scores.shape == (layout.num_tokens,)


def test_a_two_pass_selector_is_charged_for_its_second_look_at_the_question(bench: Bench) -> None:
    run = blend(bench, prompt([C, A, B]), ratio=0.25, selector=TwoPassSelector())
    cached = len(A) + len(B)
    assert run.sequence.charged_ratio == pytest.approx((run.sequence.plan.budget + len(QUESTION)) / cached)


def test_a_selector_that_ends_too_early_is_refused(bench: Bench) -> None:
    class Short:
        name = "short"

        def passes(self, context: SelectionContext) -> Passes:
            yield Pass(range(2), context.fresh_rows)

    with pytest.raises(RuntimeError, match="last row left the last layer"):
        blend(bench, prompt([C, A]), selector=Short())
