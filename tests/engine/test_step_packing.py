"""Any mix of sequences in shared ticks, cut by rows and by layers and stalled at random, equals each one alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from blends import QUESTION, SYSTEM, A, B, C, D, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Bench, DictSource, random_ids, tiny_config, tiny_model

from kvblend.engine.bound import KLModel
from kvblend.engine.layout import Reuse
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.bounded import BoundedSelector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.sequence import Charges, SequenceState
from kvblend.engine.step import Outcome, WorkItem

TOLERANCE = 1e-5
ANSWER = random_ids(4, 90)
LAYERS = 4
EVERYTHING = 1 << 30
# level 0 at every ratio: raised once or twice, then full
RAISING = KLModel(level=0.0, slope=0.0, per_ratio=-4.0, per_entropy=0.0, margin=0.0, spread=0.0, samples=1)
WINDOWED = tiny_config(sliding_window=12, windowed_layers=(True, False, True, True))
BENCHES = {
    "plain": Bench(tiny_model(dtype=torch.float32)),
    "windows": Bench(tiny_model(WINDOWED, seed=3, dtype=torch.float32)),
}


def blended(spec: SelectorSpec) -> Callable[[], Selector]:
    return lambda: build_selector(spec)


KINDS: dict[str, Callable[[], Selector]] = {
    "prefill": PlainSelector,
    "divergence": blended(SelectorSpec()),
    "divergence, residual": blended(SelectorSpec(check_layers=(1, 2), residual="mean")),
    "narrowing": blended(SelectorSpec(check_layers=(1, 2), recompute_ratios=(0.6, 0.3))),
    "query": blended(SelectorSpec("query")),
    "query, residual": blended(SelectorSpec("query", residual="distance")),
    "sensitive": blended(SelectorSpec("sensitive", residual="ridge")),
    "union": blended(SelectorSpec("union")),
    "product": blended(SelectorSpec("product")),
    "random": blended(SelectorSpec("random")),
    "bounded": lambda: BoundedSelector(SelectorSpec("query"), 0.3, 0.25, RAISING),
}
LAYOUTS = {kind: prompt([(C, A, B), (B, D), (D, C, A)][index % 3]) for index, kind in enumerate(KINDS)}


@dataclass
class Told:
    """What one sequence gave: logits of every row that gives a token, and what all its ticks did."""

    sequence: SequenceState
    source: DictSource
    logits: list[torch.Tensor] = field(default_factory=list)
    row_layers: int = 0

    @property
    def ended(self) -> bool:
        return len(self.logits) > len(ANSWER)

    def take(self, bench: Bench, outcome: Outcome) -> None:
        self.row_layers += outcome.row_layers
        if outcome.status != "last_row":
            return
        assert outcome.hidden is not None
        with torch.inference_mode():
            self.logits.append(bench.model.logits(outcome.hidden[None])[0])
        if not self.ended:
            self.sequence.append_token(ANSWER[len(self.logits) - 1])

    @property
    def figures(self) -> tuple[tuple[int, int, int], float, Charges, int]:
        state = self.sequence
        return state.count_tokens(), state.charged_ratio, state.charges, self.row_layers

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.sequence.num_computed_tokens
        return self.sequence.slab.k[:, :, :tokens], self.sequence.slab.v[:, :, :tokens]


@functools.cache
def stored(name: str, kind: str) -> dict[int, list[memoryview]]:
    bench, layout = BENCHES[name], LAYOUTS[kind]
    parts = {0: bench.payloads((), SYSTEM)}
    return parts | {s.start: bench.payloads(SYSTEM, s.token_ids) for _, s in layout.chunks()}


def begin(name: str, kind: str, ready: int = EVERYTHING) -> Told:
    layout = LAYOUTS[kind]
    cached = [Reuse.CACHED] * (len(layout.segments) - 3)
    marks = [Reuse.EXACT, Reuse.EXACT, *cached, Reuse.FRESH]
    if kind == "prefill":
        marks = [Reuse.FRESH] * len(layout.segments)
    source = DictSource(stored(name, kind), ready)
    return Told(BENCHES[name].start(layout, marks, 0.3, KINDS[kind](), source), source)


@functools.cache
def alone(name: str, kind: str) -> Told:
    bench, told = BENCHES[name], begin(name, kind)
    while not told.ended:
        told.take(bench, bench.step.run([WorkItem(told.sequence, EVERYTHING)])[0])
    return told


def cut(chance: random.Random, told: Told) -> WorkItem:
    rows = chance.choice([1, 3, 7, 20, EVERYTHING])
    return WorkItem(told.sequence, rows, chance.choice([None, None, 1, 2, 3]))


def check_limits(kind: str, item: WorkItem, outcome: Outcome, running: int) -> None:
    """No more layers than were allowed; no more rows either, but for a slice that was on its way (`running` rows)."""
    rows = EVERYTHING if "residual" in kind or "sensitive" in kind else max(item.rows_max, running)
    assert outcome.rows <= rows
    assert outcome.row_layers <= rows * min(LAYERS, item.layers_max or LAYERS)


def run_packed(name: str, kinds: Sequence[str], chance: random.Random) -> list[Told]:
    """Ticks of random members, each with its own limits, while layers arrive one by one."""
    bench = BENCHES[name]
    members = {kind + str(at): begin(name, kind, chance.choice([0, 1, 3, EVERYTHING])) for at, kind in enumerate(kinds)}
    for _ in range(10_000):
        due = [(key, told) for key, told in members.items() if not told.ended and chance.random() < 0.8]
        if all(told.ended for told in members.values()):
            return list(members.values())
        items = [cut(chance, told) for _, told in due]
        running = [0 if told.sequence.slice is None else told.sequence.slice.rows.shape[0] for _, told in due]
        for (key, told), item, rows, outcome in zip(due, items, running, bench.step.run(items), strict=True):
            check_limits(key, item, outcome, rows)
            told.take(bench, outcome)
        for told in members.values():
            told.source.ready += chance.choice([0, 0, 1, 2])
    raise AssertionError("the sequences do not end")


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("name", BENCHES)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5), st.integers(0, 1 << 32))
def test_any_mix_in_any_cuts_equals_each_sequence_alone(name: str, kinds: list[str], seed: int) -> None:
    members = run_packed(name, kinds, random.Random(seed))
    for kind, told in zip(kinds, members, strict=True):
        want = alone(name, kind)
        for got, logits in zip(told.logits, want.logits, strict=True):
            assert_close(got, logits)
        for got, slots in zip(told.kv, want.kv, strict=True):
            assert_close(got, slots)
        assert told.figures == want.figures
        assert told.sequence.parity_error < TOLERANCE
        BENCHES[name].pool.release(told.sequence.slab)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows_max", "layers_max"), [(1, None), (EVERYTHING, 1), (5, 2)])
def test_every_way_to_blend_can_be_cut(kind: str, rows_max: int, layers_max: int | None) -> None:
    bench, told, want = BENCHES["plain"], begin("plain", kind), alone("plain", kind)
    while not told.ended:
        told.take(bench, bench.step.run([WorkItem(told.sequence, rows_max, layers_max)])[0])
    assert_close(told.logits[-1], want.logits[-1])
    assert told.figures == want.figures


def test_a_pass_that_takes_all_rows_at_once_is_cut_by_layers() -> None:
    bench, told = BENCHES["plain"], begin("plain", "query, residual")
    while told.sequence.current is not None and told.sequence.current.residual is None:
        bench.step.run([WorkItem(told.sequence, EVERYTHING)])
    assert told.sequence.current is not None
    rows = told.sequence.current.rows.shape[0]
    done = [bench.step.run([WorkItem(told.sequence, 1, 1)])[0] for _ in range(LAYERS)]
    assert [(outcome.status, outcome.rows, outcome.row_layers) for outcome in done] == [
        *[("running", rows, rows)] * (LAYERS - 1),
        ("last_row", rows, rows),
    ]


def test_decode_rows_get_their_token_beside_a_blend_that_is_cut() -> None:
    bench, decoding, blend = BENCHES["plain"], begin("plain", "prefill"), begin("plain", "query, residual")
    decoding.take(bench, bench.step.run([WorkItem(decoding.sequence, EVERYTHING)])[0])
    first, second = bench.step.run([WorkItem(decoding.sequence, 1), WorkItem(blend.sequence, 8, 1)])
    assert (first.status, second.status) == ("last_row", "running")
    assert second.row_layers <= len(QUESTION)


def test_a_limit_counts_over_the_passes_that_follow_in_one_tick() -> None:
    """All rows project at layer 1 and the chosen ones go on from there: layers 0 and 1 are two."""
    bench, told = BENCHES["plain"], begin("plain", "divergence")
    bench.step.run([WorkItem(told.sequence, EVERYTHING, 2)])
    assert told.sequence.slice is not None
    assert told.sequence.slice.layer == 2


def test_a_limit_below_one_is_one() -> None:
    bench, told = BENCHES["plain"], begin("plain", "prefill")
    bench.step.run([WorkItem(told.sequence, 0, 0)])
    assert told.sequence.slice is not None
    assert (told.sequence.slice.layer, told.sequence.slice.rows.tolist()) == (1, [0])


def test_a_sequence_without_layers_holds_nobody_back() -> None:
    bench, stuck, free = BENCHES["plain"], begin("plain", "divergence", ready=1), begin("plain", "query")
    outcomes = [bench.step.run([WorkItem(t.sequence, EVERYTHING) for t in (stuck, free)]) for _ in range(2)]
    assert [[outcome.status for outcome in tick] for tick in outcomes] == [
        ["stalled", "running"],
        ["stalled", "last_row"],
    ]
