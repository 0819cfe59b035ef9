"""The device step on models with sliding windows, two RoPEs, part-rotated heads and RoPE by length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blends import LAYOUTS, QUESTION, A, B, C, D, assert_equal, blend, prompt
from tiny_models import Bench, random_ids, tiny_config, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend, SdpaPlan
from kvblend.engine.config import RopeConfig
from kvblend.engine.layout import Reuse
from kvblend.engine.rope import RopeTable
from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, merge_rows
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.step import WorkItem

HALF, LOCAL = RopeConfig(rotary_fraction=0.5), RopeConfig(100.0)
LONG = RopeConfig(
    1e4, "longrope", 4.0, original_context=40, short_factors=(1.0, 1.1, 1.2, 1.3), long_factors=(1.0, 2.0, 4.0, 9.0)
)
MIXED = {"sliding_window": 12, "windowed_layers": (True, True, False, True)}
MODELS: dict[str, dict[str, Any]] = {
    "every layer": {"sliding_window": 12},
    "one key": {"sliding_window": 1},
    "wider than any prompt": {"sliding_window": 400},
    "some layers": MIXED,
    "two ropes": {**MIXED, "rope_local": LOCAL},
    "two ropes, normed": {**MIXED, "rope_local": LOCAL, "qk_norm": True, "post_norms": True, "activation": "gelu_tanh"},
    "part of a head": {**MIXED, "rope": HALF},
    "yarn": {"rope": RopeConfig(1e4, "yarn", 4.0, original_context=32)},
    "by length": {"rope": LONG, **MIXED},
    "by every length": {"rope": RopeConfig(kind="dynamic", factor=4.0, original_context=40)},
}
BENCHES: dict[str, Bench] = {}


@pytest.fixture(params=MODELS)
def bench(request: pytest.FixtureRequest) -> Bench:
    if request.param not in BENCHES:
        BENCHES[request.param] = Bench(tiny_model(tiny_config(**MODELS[request.param])))
    return BENCHES[request.param]


def mixed() -> Bench:
    return Bench(tiny_model(tiny_config(**MODELS["two ropes"])))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ratio_one_equals_full_prefill(bench: Bench, name: str) -> None:
    layout, missing = LAYOUTS[name]
    assert_equal(blend(bench, layout, missing), bench.full(layout))


def test_ratio_one_equals_full_prefill_over_bare_chunks(bench: Bench) -> None:
    layout = prompt([C, A, B])
    assert_equal(blend(bench, layout, bare=True), bench.full(layout))


@pytest.mark.parametrize("residual", ["none", "mean", "ridge"])
def test_question_guided_at_ratio_one_equals_full_prefill(bench: Bench, residual: Any) -> None:
    layout = prompt([C, A, B])
    run = blend(bench, layout, selector=QuerySelector(SelectorSpec("query", residual=residual)))
    assert_equal(run, bench.full(layout))


def test_layer_zero_keys_from_the_store_equal_fresh_ones(bench: Bench) -> None:
    assert blend(bench, prompt([C, A, B]), ratio=0.3).sequence.parity_error < 1e-12


@pytest.mark.parametrize("rows_max", [1, 7, 30])
def test_slices_of_rows_change_nothing(bench: Bench, rows_max: int) -> None:
    layout = prompt([C, A, B])
    assert_equal(blend(bench, layout, ratio=0.4, rows_max=rows_max), blend(bench, layout, ratio=0.4))


def test_packed_sequences_equal_single_ones(bench: Bench) -> None:
    layouts = [prompt([C, A, B]), prompt([B, D]), prompt([A], QUESTION[:1])]
    want = [bench.full(layout).logits for layout in layouts]
    running = [bench.start(lay, [Reuse.FRESH] * len(lay.segments), 0.0, PlainSelector()) for lay in layouts]
    for outcome, logits in zip(bench.step.run([WorkItem(s, 1 << 30) for s in running]), want, strict=True):
        assert outcome.hidden is not None
        assert torch.allclose(bench.model.logits(outcome.hidden[None])[0], logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["every layer", "two ropes", "part of a head", "yarn"])
def test_a_decode_row_equals_a_longer_prefill(name: str) -> None:
    bench = Bench(tiny_model(tiny_config(**MODELS[name])))
    run = bench.full(prompt([A]))
    token = int(run.logits.argmax())
    run.sequence.append_token(token)
    assert_equal(bench.finish(run.sequence), bench.full(prompt([A], (*QUESTION, token))))


def test_what_is_outside_the_window_changes_nothing() -> None:
    """With a window in every layer the last row sees (window - 1) x layers positions back, and no further."""
    bench = Bench(tiny_model(tiny_config(sliding_window=6)))
    reach = 5 * bench.model.num_layers
    near = random_ids(reach + 1, 70)
    runs = [bench.full(prompt([random_ids(30, seed)], near)).logits for seed in (71, 72)]
    seen = [bench.full(prompt([random_ids(30, seed)], near[1:])).logits for seed in (71, 72)]
    assert torch.equal(*runs)
    assert not torch.equal(*seen)


def test_layers_with_the_same_window_share_a_plan() -> None:
    windows: list[int | None] = []

    class Counting(SdpaBackend):
        def prepare(
            self, positions: torch.Tensor, device: torch.device, dtype: torch.dtype, window: int | None = None
        ) -> SdpaPlan:
            windows.append(window)
            return super().prepare(positions, device, dtype, window)

    bench = Bench(tiny_model(tiny_config(**MIXED, num_layers=4)), Counting())
    bench.full(prompt([A, B]))
    # the last layer attends with the last row alone
    assert windows == [12, None, 12]


class Scoring:
    """One scored pass over the fresh rows, then everything."""

    name = "scoring"

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.scores = torch.empty(0)

    def passes(self, context: SelectionContext) -> Passes:
        seen = yield Pass(range(context.num_layers), context.fresh_rows, observe="attention", score_layers=self.layers)
        assert seen.attention is not None
        self.scores = seen.attention
        yield Pass(range(context.num_layers), merge_rows(context.cached_rows, context.fresh_rows))


@pytest.mark.parametrize(("layer", "windowed"), [(0, True), (2, False)])
def test_scores_of_a_windowed_layer_stay_within_the_window(layer: int, windowed: bool) -> None:
    selector = Scoring(frozenset({layer}))
    layout = prompt([C, A, B])
    blend(mixed(), layout, selector=selector)
    first = layout.segments[-1].start - 12 + 1
    assert bool((selector.scores[:first] == 0).all()) == windowed
    assert bool((selector.scores[first:] > 0).all())


def test_stored_keys_of_windowed_layers_are_rotated_by_their_own_base(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, layout = mixed(), prompt([C, A])
    plain = bench.model.ropes.tables(1, 100)[0]
    monkeypatch.setattr(RopeTable, "span", lambda _, start, end: (plain.cos[start:end], plain.sin[start:end]))
    assert blend(bench, layout, ratio=0.2).sequence.parity_error > 1e-2


def test_the_prompt_s_length_chooses_the_rope_of_stored_keys_too() -> None:
    bench = Bench(tiny_model(tiny_config(rope=LONG)))
    short, long = prompt([C], QUESTION[:4]), prompt([C, A])
    assert short.num_tokens <= LONG.original_context < long.num_tokens
    for layout in (short, long):
        run = blend(bench, layout, ratio=0.5, bare=True)
        assert run.sequence.parity_error < 1e-12
        assert run.sequence.context.cached_rows.numel() > 0
