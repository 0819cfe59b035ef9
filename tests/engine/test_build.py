"""Every selector by its spec, run by the real step: exact at ratio 1, its budget kept, its cost as defined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import Bench, DictSource, Run, random_ids, tiny_model

from kvblend.engine.layout import PromptLayout, Reuse, SegmentKind
from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, Selector
from kvblend.engine.selectors.blind import BlindSelector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.mixed import MixedSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.selectors.spec import SelectorName, SelectorSpec

SYSTEM, QUESTION = random_ids(5, 1), random_ids(4, 2)
CHUNKS = [random_ids(count, 10 + count) for count in (9, 14, 6, 11)]
NAMES: tuple[SelectorName, ...] = get_args(SelectorName)
# ways to ask, beside the names alone; with "ratios" as factors of the ratio of a run
SPECS: dict[str, dict[str, Any]] = {
    **{name: {"selector": name} for name in NAMES},
    "two check layers": {"check_layers": (1, 3), "divergence": "kv"},
    "gradual": {"check_layers": (1, 2), "recompute_ratios": (1.0, 1.0)},
    "thresholds": {"check_layers": (1, 2), "thresholds": (0.0, 0.0), "divergence": "v"},
    "options": {"selector": "query", "sinks": 1, "span": 3, "chunk_budget": "need", "probes": 0.3},
    "corrected": {"selector": "query", "score_layers": "middle", "residual": "ridge"},
    "gradual, corrected": {"check_layers": (1, 2), "recompute_ratios": (1.0, 1.0), "residual": "mean"},
}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(tiny_model())


class Seen:
    """A selector that remembers its context and passes."""

    def __init__(self, inner: Selector) -> None:
        self.name, self._inner = inner.name, inner
        self.items: list[Pass] = []
        self.context: SelectionContext | None = None

    def passes(self, context: SelectionContext) -> Passes:
        self.context = context
        inner = self._inner.passes(context)
        item = next(inner)
        while True:
            self.items.append(item)
            seen = yield item
            try:
                item = inner.send(seen)
            except StopIteration:
                return


def prompt(order: Sequence[int]) -> PromptLayout:
    chunks = [(SegmentKind.CHUNK, CHUNKS[index]) for index in order]
    return PromptLayout.of([(SegmentKind.SYSTEM, SYSTEM), *chunks, (SegmentKind.QUESTION, QUESTION)])


def blend(
    bench: Bench, order: Sequence[int], ratio: float, missing: frozenset[int] = frozenset(), rows_max: int = 1 << 30,
    **fields: Any,
) -> tuple[Run, Seen]:  # fmt: skip
    """A blend of stored chunks in this order, those at the `missing` places computed fresh."""
    layout = prompt(order)
    payloads, reuse = {0: bench.payloads((), SYSTEM)}, [Reuse.EXACT]
    for place, (_, segment) in enumerate(layout.chunks()):
        if place in missing:
            reuse.append(Reuse.FRESH)
            continue
        payloads[segment.start] = bench.payloads(SYSTEM, segment.token_ids)
        reuse.append(Reuse.CACHED if place else Reuse.EXACT)
    selector = Seen(build_selector(SelectorSpec(**fields)))
    sequence = bench.start(layout, [*reuse, Reuse.FRESH], ratio, selector, DictSource(payloads))
    return bench.finish(sequence, rows_max), selector


def assert_equal(got: Run, want: Run) -> None:
    for name in ("logits", "k", "v"):
        one, other = getattr(got, name), getattr(want, name)
        assert (one - other).abs().max() <= 1e-9 * other.abs().max(), name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("divergence", DivergenceSelector),
        ("query", QuerySelector),
        ("union", MixedSelector),
        ("product", MixedSelector),
        ("random", BlindSelector),
        ("sinks", BlindSelector),
    ],
)
def test_every_name_has_its_selector(name: SelectorName, kind: type) -> None:
    selector = build_selector(SelectorSpec(name))
    assert type(selector) is kind
    assert selector.name == name


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    missing=st.frozensets(st.integers(0, 3), max_size=2),
    rows_max=st.sampled_from([5, 1 << 30]),
)
def test_ratio_one_equals_full_prefill(
    bench: Bench, name: str, order: list[int], missing: frozenset[int], rows_max: int
) -> None:
    got, _ = blend(bench, order, 1.0, missing, rows_max, **SPECS[name])
    assert_equal(got, bench.full(prompt(order)))


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    missing=st.frozensets(st.integers(0, 3), max_size=1),
    ratio=st.sampled_from([0.05, 0.3, 0.7]),
    rows_max=st.sampled_from([7, 1 << 30]),
)
def test_the_budget_is_kept_and_fresh_rows_are_in_every_pass(
    bench: Bench, name: str, order: list[int], missing: frozenset[int], ratio: float, rows_max: int
) -> None:
    fields = dict(SPECS[name])
    if "recompute_ratios" in fields:
        fields["recompute_ratios"] = (ratio, ratio / 2)
    run, seen = blend(bench, order, ratio, missing, rows_max, **fields)
    assert seen.context is not None
    cached, fresh = set(seen.context.cached_rows.tolist()), set(seen.context.fresh_rows.tolist())
    wanted = math.ceil((ratio / 2 if "recompute_ratios" in fields else ratio) * len(cached) - 1e-9)
    rows = [set(item.rows.tolist()) for item in seen.items]
    assert all(fresh <= part <= fresh | cached for part in rows)
    assert len(rows[-1] - fresh) == wanted
    assert run.sequence.count_tokens()[1:] == (wanted, len(fresh))


LAYERS, CACHED = 4, len(CHUNKS[1]) + len(CHUNKS[2])
QUESTIONS = len(QUESTION) / CACHED


@pytest.mark.parametrize(
    ("fields", "charged"),
    [
        ({}, lambda r: (2 + 2 * r) / LAYERS),
        ({"check_layers": (2,)}, lambda r: (3 + r) / LAYERS),
        ({"check_layers": (1, 2)}, lambda r: (3 + r) / LAYERS),
        ({"selector": "query"}, lambda r: r + QUESTIONS),
        ({"selector": "query", "score_layers": (0, 1)}, lambda r: r + QUESTIONS * 2 / LAYERS),
        ({"selector": "random"}, lambda r: r),
        ({"selector": "sinks"}, lambda r: r),
        ({"selector": "union"}, lambda r: (2 + 2 * r) / LAYERS + QUESTIONS),
        ({"selector": "product"}, lambda r: (2 + 2 * r) / LAYERS + QUESTIONS),
        ({"check_layers": (1, 2), "recompute_ratios": (0.5, 0.25)}, lambda r: (2 + r + r / 2) / LAYERS),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_the_charged_ratio_follows_from_the_passes(bench: Bench, fields: dict[str, Any], charged: Any) -> None:
    run, _ = blend(bench, (0, 1, 2), 0.5, **fields)
    assert CACHED % 4 == 0
    assert run.sequence.charged_ratio == pytest.approx(charged(0.5))


@pytest.mark.parametrize("name", SPECS)
def test_slices_of_rows_change_nothing(bench: Bench, name: str) -> None:
    whole, _ = blend(bench, (2, 0, 1, 3), 0.4, **SPECS[name])
    cut, _ = blend(bench, (2, 0, 1, 3), 0.4, rows_max=6, **SPECS[name])
    assert_equal(cut, whole)


def test_a_planted_threshold_separates_what_changed_much_from_what_did_not(bench: Bench) -> None:
    counts = []
    for threshold in (0.0, 0.05, 0.5, 1e9):
        run, _ = blend(bench, (0, 1, 2), 1.0, thresholds=(threshold,))
        counts.append(run.sequence.count_tokens()[1])
    assert counts[0] == CACHED
    assert counts[-1] == 0
    assert counts == sorted(counts, reverse=True)
    assert 0 < counts[1] < CACHED or 0 < counts[2] < CACHED


def test_nested_sets_at_equal_ratios_are_one_set(bench: Bench) -> None:
    one, _ = blend(bench, (0, 1, 2), 0.5)
    nested, _ = blend(bench, (0, 1, 2), 0.5, check_layers=(1, 2), recompute_ratios=(0.5, 0.5))
    assert_equal(nested, one)


def test_what_is_left_out_on_the_way_keeps_what_was_computed(bench: Bench) -> None:
    run, seen = blend(bench, (0, 1, 2), 0.5, check_layers=(1, 2), recompute_ratios=(0.5, 0.25))
    first, second = (set(item.rows.tolist()) for item in seen.items[1:])
    assert second < first
    wide, _ = blend(bench, (0, 1, 2), 0.5)
    dropped = torch.tensor(sorted(first - second))
    # layers up to the second check layer are the same as if the first set had been kept, those above are not
    assert torch.equal(run.k[:3, :, dropped], wide.k[:3, :, dropped])
    assert not torch.allclose(run.k[3, :, dropped], wide.k[3, :, dropped])
