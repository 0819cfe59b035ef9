"""Divergence selection by its definition: how many rows, which ones, by what measure, at which layer."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import Bench, DictSource, random_ids, tiny_model

from kvblend.engine.capture import payload_tensors
from kvblend.engine.layout import PromptLayout, Reuse, SegmentKind
from kvblend.engine.selectors.base import Observation, Pass, Passes, SelectionContext, merge_rows
from kvblend.engine.selectors.divergence import DivergenceSelector

Measure = Literal["k", "v", "kv"]


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
    given: SelectionContext, key_change: torch.Tensor, value_change: torch.Tensor, of: Measure = "k", layer: int = 1
) -> list[int]:
    """The cached rows in the second pass, where the step saw these changes for all rows of the first."""
    passes = DivergenceSelector(layer, of).passes(given)
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
def test_the_measure_is_keys_values_or_their_sum(of: Measure, wanted: list[int]) -> None:
    given = context(1)
    keys, values = changes(given, {5: 5.0, 12: 4.0}), changes(given, {8: 5.0, 12: 4.0})
    assert choose(given, keys, values, of) == wanted


def listed(passes: list[Pass]) -> list[tuple[range, str, str, int]]:
    return [(item.layers, item.stop, item.observe, len(item.rows)) for item in passes]


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_passes_meet_at_the_check_layer(layer: int) -> None:
    given = context(2)
    passes = DivergenceSelector(layer).passes(given)
    first = next(passes)
    second = passes.send(Observation(first.rows, torch.rand(15), torch.rand(15)))
    assert listed([first, second]) == [
        (range(layer + 1), "qkv", "divergence", 15),
        (range(layer, 4), "output", "nothing", 7),
    ]


def test_without_a_budget_one_plain_pass() -> None:
    given = context(0)
    assert listed(list(DivergenceSelector().passes(given))) == [(range(4), "output", "nothing", 5)]


@pytest.mark.parametrize("layer", [0, -1])
def test_a_check_layer_below_one_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"check_layer is {layer}; layer 0 cannot diverge"):
        DivergenceSelector(layer)


def test_a_check_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"check_layer is 4; the model has layers 0\.\.3"):
        next(DivergenceSelector(4).passes(context(2)))


def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="divergence is 'q'; choose k, v, kv"):
        DivergenceSelector(1, "q")  # type: ignore[arg-type]


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
def test_a_planted_change_is_chosen_first(bench: Bench, layer: int, of: Measure, which: str) -> None:
    chosen = blend(bench, 0.01, Watched(layer, of), (13, layer, which))
    assert chosen == [CACHED.start + 13]


def test_a_change_of_values_is_not_seen_by_keys(bench: Bench) -> None:
    untouched = blend(bench, 0.1, Watched(1, "k"))
    assert blend(bench, 0.1, Watched(1, "k"), (13, 1, "v")) == untouched
