"""Divergence selection by its definition: how many rows, which ones, by what measure, at which layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import Bench, DictSource, random_ids, tiny_model

from kvblend.engine.capture import payload_tensors
from kvblend.engine.layout import PromptLayout, Reuse, SegmentKind
from kvblend.engine.selectors.base import Observation, Pass, Passes, SelectionContext, merge_rows
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.spec import DivergenceOf, SelectorSpec


def context(budget: int, cached: int = 10, num_layers: int = 4) -> SelectionContext:
    """Two exact rows, a miss of two, cached rows, a question of three."""
    start = 4 + cached
    question = torch.arange(start, start + 3)
    return SelectionContext(
        num_layers=num_layers,
        num_tokens=start + 3,
        cached_rows=torch.arange(4, start),
        fresh_rows=torch.cat((torch.tensor([2, 3]), question)),
        question_rows=question,
        budget=budget,
    )


def choose(
    given: SelectionContext, key_change: torch.Tensor, value_change: torch.Tensor, of: DivergenceOf = "k"
) -> list[int]:
    """The cached rows in the second pass, where the step saw these changes for all rows of the first."""
    passes = DivergenceSelector(SelectorSpec(divergence=of)).passes(given)
    first = next(passes)
    second = passes.send(Observation(first.rows, key_change, value_change))
    assert set(given.fresh_rows.tolist()) <= set(second.rows.tolist())
    return sorted(set(second.rows.tolist()) - set(given.fresh_rows.tolist()))


def changes(given: SelectionContext, planted: dict[int, float]) -> torch.Tensor:
    """A change per row of the first pass: huge on rows that may not be chosen, `planted` on these, else 0."""
    everything = merge_rows(given.cached_rows, given.fresh_rows)
    out = torch.where(torch.isin(everything, given.fresh_rows), 1e9, 0.0)
    for position, change in planted.items():
        out[everything == position] = change
    return out


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 1 << 16))
def test_exactly_the_budget_is_chosen_and_cached_rows_only(cached: int, budget: int, seed: int) -> None:
    given = context(max(1, min(budget, cached)), cached)
    change = torch.rand(cached + 5, generator=torch.Generator().manual_seed(seed))
    chosen = choose(given, change, change)
    assert len(chosen) == given.budget
    assert set(chosen) <= set(given.cached_rows.tolist())


def test_fresh_rows_do_not_take_the_budget_however_much_they_differ() -> None:
    given = context(2)
    change = changes(given, {6: 3.0, 11: 2.0, 5: 1.0})
    assert choose(given, change, torch.zeros_like(change)) == [6, 11]


def test_ties_fall_to_the_earlier_position() -> None:
    given = context(3)
    change = changes(given, {9: 1.0})
    assert choose(given, change, change) == [4, 5, 9]


@pytest.mark.parametrize(("of", "wanted"), [("k", [5]), ("v", [8]), ("kv", [12])])
def test_the_measure_is_keys_values_or_their_sum(of: DivergenceOf, wanted: list[int]) -> None:
    given = context(1)
    keys, values = changes(given, {5: 5.0, 12: 4.0}), changes(given, {8: 5.0, 12: 4.0})
    assert choose(given, keys, values, of) == wanted


def listed(passes: list[Pass]) -> list[tuple[range, str, str, int]]:
    return [(item.layers, item.stop, item.observe, len(item.rows)) for item in passes]


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_passes_meet_at_the_check_layer(layer: int) -> None:
    given = context(2)
    passes = DivergenceSelector(SelectorSpec(check_layers=(layer,))).passes(given)
    first = next(passes)
    second = passes.send(Observation(first.rows, torch.rand(15), torch.rand(15)))
    assert listed([first, second]) == [
        (range(layer + 1), "qkv", "divergence", 15),
        (range(layer, 4), "output", "nothing", 7),
    ]


def test_without_a_budget_one_plain_pass() -> None:
    given = context(0)
    assert listed(list(DivergenceSelector().passes(given))) == [(range(4), "output", "nothing", 5)]


def test_a_check_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"check_layers is \(1, 4\); the model has layers 0\.\.3"):
        next(DivergenceSelector(SelectorSpec(check_layers=(1, 4))).passes(context(2)))


Planted = dict[int, float]


def stepped(spec: SelectorSpec, given: SelectionContext, *seen: tuple[Planted, Planted]) -> list[list[int]]:
    """The cached rows of every pass, where each check layer shows (squared change, squared size of the cached)."""
    passes = DivergenceSelector(spec).passes(given)
    item, out, cached = next(passes), [], set(given.cached_rows.tolist())
    for change, norm in seen:
        out.append([row for row in item.rows.tolist() if row in cached])
        shown = torch.tensor([change.get(row, 0.0) for row in item.rows.tolist()])
        size = torch.tensor([norm.get(row, 1.0) for row in item.rows.tolist()])
        item = passes.send(Observation(item.rows, shown, shown, size, size))
    return [*out, [row for row in item.rows.tolist() if row in cached]]


def test_several_check_layers_are_summed_as_shares_of_their_totals() -> None:
    spec = SelectorSpec(check_layers=(1, 2))
    # row 5 has half of the small layer and 9 % of the large one, row 8 has 64 % of the large one
    one: Planted = {5: 0.5, 6: 0.25, 7: 0.25}
    other: Planted = {5: 10.0, 8: 70.0, 9: 30.0}
    assert stepped(spec, context(1), (one, {}), (other, {}))[-1] == [8]
    assert stepped(spec, context(2), (one, {}), (other, {}))[-1] == [5, 8]


def test_one_set_goes_on_with_all_rows_up_to_the_last_check_layer() -> None:
    given = context(2)
    everything = given.cached_rows.tolist()
    rows = stepped(SelectorSpec(check_layers=(1, 3)), given, ({6: 1.0}, {}), ({9: 1.0}, {}))
    assert rows == [everything, everything, [6, 9]]


def test_ratios_narrow_the_set_at_each_check_layer() -> None:
    spec = SelectorSpec(check_layers=(1, 2), recompute_ratios=(0.3, 0.11))
    # row 13 changes most at layer 2, but was left out at layer 1
    rows = stepped(spec, context(3), ({5: 3.0, 8: 2.0, 11: 1.0}, {}), ({13: 9.0, 8: 2.0, 11: 3.0, 5: 1.0}, {}))
    assert rows == [list(range(4, 14)), [5, 8, 11], [8, 11]]


def test_passes_of_nested_sets_meet_at_their_check_layers() -> None:
    given = context(3)
    passes = DivergenceSelector(SelectorSpec(check_layers=(1, 3), recompute_ratios=(0.3, 0.2))).passes(given)
    first = next(passes)
    second = passes.send(Observation(first.rows, torch.rand(15), torch.rand(15)))
    third = passes.send(Observation(second.rows, torch.rand(8), torch.rand(8)))
    assert listed([first, second, third]) == [
        (range(2), "qkv", "divergence", 15),
        (range(1, 4), "qkv", "divergence", 8),
        (range(3, 4), "output", "nothing", 7),
    ]


def test_the_budget_bounds_every_set() -> None:
    rows = stepped(SelectorSpec(recompute_ratios=(0.5,)), context(2), ({5: 3.0, 8: 2.0, 11: 1.0}, {}))
    assert rows[-1] == [5, 8]


def test_thresholds_choose_rows_whose_relative_change_reaches_them() -> None:
    spec = SelectorSpec(check_layers=(1, 2), thresholds=(0.5, 0.25))
    first = {4: 1.0, 5: 4.0, 6: 2.0, 7: 1.9}, {5: 8.0, 6: 8.0, 7: 3.0}
    second = {4: 0.1, 5: 1.0, 7: 1.0, 9: 9.0}, {5: 4.0, 7: 5.0}
    assert stepped(spec, context(10), first, second)[1:] == [[4, 5, 7], [5]]


def test_a_threshold_nobody_reaches_leaves_the_fresh_rows() -> None:
    assert stepped(SelectorSpec(thresholds=(2.0,)), context(10), ({5: 1.0}, {}))[-1] == []


def test_sinks_are_chosen_below_the_threshold_too() -> None:
    assert stepped(SelectorSpec(thresholds=(1.0,), sinks=1), context(10), ({9: 1.0}, {}))[-1] == [4, 9]


def test_the_budget_bounds_what_thresholds_choose() -> None:
    assert stepped(SelectorSpec(thresholds=(1.0,)), context(1), ({5: 1.0, 9: 2.0}, {}))[-1] == [9]


def test_a_threshold_needs_the_size_of_what_was_cached() -> None:
    passes = DivergenceSelector(SelectorSpec(thresholds=(1.0,))).passes(context(2))
    first = next(passes)
    with pytest.raises(RuntimeError, match="size of what was cached"):
        passes.send(Observation(first.rows, torch.rand(15), torch.rand(15)))


@pytest.mark.parametrize("fields", [{"check_layers": (1, 2)}, {"recompute_ratios": (0.3, 0.2), "check_layers": (1, 2)}])
def test_rows_left_out_are_corrected_from_then_on(fields: dict[str, Any]) -> None:
    given = dataclasses.replace(context(3), cached_spans=((4, 14),))
    passes = DivergenceSelector(SelectorSpec(residual="mean", **fields)).passes(given)
    items = [next(passes)]
    for _ in range(2):
        shown = torch.rand(items[-1].rows.shape[0])
        items.append(passes.send(Observation(items[-1].rows, shown, shown)))
    narrowed = "recompute_ratios" in fields
    assert [item.residual is not None for item in items] == [False, narrowed, True]


def test_a_step_that_observed_nothing_is_an_error() -> None:
    passes = DivergenceSelector().passes(context(2))
    first = next(passes)
    with pytest.raises(RuntimeError, match="did not observe divergence"):
        passes.send(Observation(first.rows))


SYSTEM, A, B, QUESTION = (random_ids(n, n) for n in (5, 21, 24, 7))
LAYOUT = PromptLayout.of(
    [
        (SegmentKind.SYSTEM, SYSTEM),
        (SegmentKind.CHUNK, A),
        (SegmentKind.CHUNK, B),
        (SegmentKind.QUESTION, QUESTION),
    ]
)
CACHED = LAYOUT.segments[2]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(tiny_model())


class Watched(DivergenceSelector):
    """Remembers the rows it chose."""

    chosen: list[int]

    def passes(self, context: SelectionContext) -> Passes:
        inner = super().passes(context)
        seen = yield next(inner)
        last = inner.send(seen)
        self.chosen = sorted(set(last.rows.tolist()) & set(context.cached_rows.tolist()))
        yield last


def blend(bench: Bench, ratio: float, selector: Watched, planted: tuple[int, int, str] | None = None) -> list[int]:
    """Chosen rows of a real blend. `planted` (row of the cached chunk, layer, "k" or "v") spoils one stored row."""
    stored = [memoryview(bytearray(layer)) for layer in bench.payloads((*SYSTEM, *A), B)]
    if planted is not None:
        row, layer, which = planted
        k, v = payload_tensors(stored[layer], 2, 8, torch.float64)
        (k if which == "k" else v)[:, row] += 3.0
    payloads = {0: bench.payloads((), SYSTEM), 5: bench.payloads(SYSTEM, A), CACHED.start: stored}
    reuse = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH]
    bench.finish(bench.start(LAYOUT, reuse, ratio, selector, DictSource(payloads)))
    return selector.chosen


@pytest.mark.parametrize("ratio", [0.001, 0.15, 0.5, 1.0])
def test_the_count_is_the_ratio_of_cached_rows_rounded_up(bench: Bench, ratio: float) -> None:
    assert len(blend(bench, ratio, Watched())) == math.ceil(ratio * len(B))


@pytest.mark.parametrize(
    ("layer", "of", "which"), [(1, "k", "k"), (1, "v", "v"), (1, "kv", "v"), (2, "k", "k"), (3, "kv", "k")]
)
def test_a_planted_change_is_chosen_first(bench: Bench, layer: int, of: DivergenceOf, which: str) -> None:
    spec = SelectorSpec(check_layers=(layer,), divergence=of)
    chosen = blend(bench, 0.01, Watched(spec), (13, layer, which))
    assert chosen == [CACHED.start + 13]


def test_a_change_of_values_is_not_seen_by_keys(bench: Bench) -> None:
    untouched = blend(bench, 0.1, Watched())
    assert blend(bench, 0.1, Watched(), (13, 1, "v")) == untouched


def test_the_size_of_what_was_cached_is_shown_by_the_step(bench: Bench) -> None:
    class Looking(Watched):
        def passes(self, context: SelectionContext) -> Passes:
            inner = super().passes(context)
            self.seen = yield next(inner)
            yield inner.send(self.seen)

    selector = Looking()
    blend(bench, 0.2, selector)
    k, v = payload_tensors(bench.payloads((*SYSTEM, *A), B)[1], 2, 8, torch.float64)
    assert selector.seen.key_norm is not None
    assert selector.seen.value_norm is not None
    assert torch.allclose(selector.seen.key_norm[: len(B)].double(), k.square().sum((0, 2)))
    assert torch.allclose(selector.seen.value_norm[: len(B)].double(), v.square().sum((0, 2)))
