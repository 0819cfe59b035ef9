"""The loading controller against simulated tiers: what it decides, and that nothing gets slower by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_driver import QUESTION, SYSTEM
from hypothesis import given, settings
from hypothesis.strategies import floats, integers, sampled_from

from kvblend.actors.core import events as ev
from kvblend.actors.core.conditioning import Conditioning
from kvblend.actors.core.controller import GAIN_S_MIN, LATER_MAX, MARGIN, Choice, Controller, Work, raise_ratio
from kvblend.actors.core.planning import segment_keys
from kvblend.actors.core.speeds import TierSpeed
from kvblend.actors.messages import BlendOptions, Mode, Sampling
from kvblend.engine.layout import PromptLayout, SegmentKind

LAYERS, TOKENS, CHUNK_BYTES = 30, 500, 20_000_000
ROW_S = 0.002
DIVERGENCE = ev.BlendShape(full_layers=2)
AUTO = replace(DIVERGENCE, auto_ratio=True)
QUERY = ev.BlendShape(full_layers=0, waits=True)


def job(shape: ev.BlendShape = DIVERGENCE, chunks: int = 6, ratio: float = 0.15, mode: Mode = "blend") -> ev.Job:
    parts: list[tuple[SegmentKind, tuple[int, ...]]] = [(SegmentKind.SYSTEM, SYSTEM)]
    parts += [(SegmentKind.CHUNK, tuple(range(n * TOKENS + 9, n * TOKENS + 9 + TOKENS))) for n in range(chunks)]
    layout = PromptLayout.of([*parts, (SegmentKind.QUESTION, QUESTION)])
    keys = segment_keys(layout, mode, Conditioning(), "m", "")
    return ev.Job("r", "generate", layout, keys, mode, ratio, BlendOptions(), Sampling(), shape=shape)


def hits(tier: str = "disk", chunks: int = 6, num_bytes: int = CHUNK_BYTES) -> list[ev.Hit]:
    head = [ev.Hit(0, True, "host"), ev.Hit(1, True, tier, num_bytes)]
    return head + [ev.Hit(n, False, tier, num_bytes) for n in range(2, chunks + 1)]


def measured(row_s: float = ROW_S, *, may_compute: bool = True) -> Controller:
    controller = Controller(LAYERS, may_compute=may_compute)
    controller.compute.note(1000.0, 1000 * row_s, blend=True)
    return controller


def choose(
    controller: Controller,
    given_job: ev.Job,
    bytes_per_s: float,
    *,
    tier: str = "disk",
    busy: int = 1,
    age_s: float = 0.0,
) -> Choice:
    speeds = {tier: TierSpeed(bytes_per_s, 0.0, 100.0)}
    return controller.choose(given_job, hits(tier), speeds, 100.0 + age_s, busy)


def test_what_loads_unnoticed_is_loaded_at_the_requests_own_ratio() -> None:
    choice = choose(measured(), job(AUTO), 1e12)
    assert (choice.ratio, choice.computed, choice.notes) == (0.15, frozenset(), ())


def test_a_slow_tier_raises_the_ratio_and_says_so() -> None:
    choice = choose(measured(may_compute=False), job(AUTO), 3e7)
    assert choice.ratio > 0.3
    assert choice.decision.ratio_auto
    assert choice.decision.ratio_floor == 0.15
    assert choice.notes == (f"recompute_ratio 0.15 raised to {choice.ratio:g}: loading hides it",)


def test_the_slower_the_tier_the_higher_the_ratio() -> None:
    ratios = [choose(measured(may_compute=False), job(AUTO), speed).ratio for speed in (1e9, 8e7, 5e7, 3e7, 1e7)]
    assert ratios == sorted(ratios)
    assert ratios[0] == 0.15
    assert ratios[-1] == 1.0


@pytest.mark.parametrize("shape", [DIVERGENCE, replace(QUERY, auto_ratio=True)])
def test_no_ratio_is_raised_that_was_given_or_that_loading_cannot_hide(shape: ev.BlendShape) -> None:
    assert choose(measured(may_compute=False), job(shape), 3e7).ratio == 0.15


def test_a_busy_device_raises_less() -> None:
    alone, busy = (choose(measured(may_compute=False), job(AUTO), 3e7, busy=count).ratio for count in (1, 3))
    assert busy < alone


def test_chunks_that_load_slower_than_they_compute_are_computed() -> None:
    choice = choose(measured(), job(), 1e6)
    assert choice.computed == frozenset(range(1, 7))
    assert choice.decision.chunks_computed == 6
    assert choice.notes == ("6 stored segments were computed: that is faster than loading them",)


def test_chunks_are_loaded_where_they_load_faster_than_they_compute() -> None:
    assert choose(measured(), job(), 3e7).computed == frozenset()


def test_chunks_of_a_fast_tier_are_loaded_beside_computed_ones_of_a_slow_tier() -> None:
    speeds = {"disk": TierSpeed(1e9, 0.0, 0.0), "remote": TierSpeed(1e6, 0.0, 0.0)}
    mixed = [*hits("disk", 3), *[ev.Hit(n, False, "remote", CHUNK_BYTES) for n in (4, 5, 6)]]
    assert measured().choose(job(), mixed, speeds, 0.0, 1).computed == frozenset({4, 5, 6})


def test_nothing_is_computed_instead_where_that_is_off() -> None:
    assert choose(measured(may_compute=False), job(), 1e6).computed == frozenset()


def test_what_brings_less_than_the_least_gain_is_loaded() -> None:
    speeds = {"disk": TierSpeed(1e6, 0.0, 0.0)}
    tiny = [replace(hit, num_bytes=int(1e6 * GAIN_S_MIN / 8)) for hit in hits()]
    assert measured(1e-7).choose(job(), tiny, speeds, 0.0, 1).computed == frozenset()


def test_a_speed_that_is_old_is_unknown_and_decides_nothing() -> None:
    choice = choose(measured(), job(AUTO), 1e6, age_s=61.0)
    assert (choice.ratio, choice.computed) == (0.15, frozenset())


def test_without_a_measured_prefill_nothing_is_decided() -> None:
    choice = choose(Controller(LAYERS), job(AUTO), 1e6)
    assert (choice.ratio, choice.computed, choice.decision.load_ms) == (0.15, frozenset(), 0.0)


def test_expected_times_are_part_of_the_decision() -> None:
    decision = choose(measured(may_compute=False), job(), 3e7).decision
    assert decision.load_ms == pytest.approx(1e3 * 6 * CHUNK_BYTES / 3e7)
    assert decision.compute_ms > 0.0


def test_chunks_in_memory_are_never_computed_instead() -> None:
    resident = [replace(hit, num_bytes=0, tier="host") for hit in hits()]
    choice = measured().choose(job(AUTO), resident, {"disk": TierSpeed(1.0, 0.0, 0.0)}, 0.0, 1)
    assert (choice.ratio, choice.computed) == (0.15, frozenset())


@pytest.mark.parametrize(
    ("speeds", "tier"),
    [
        ({"disk": 1e12, "remote": 1e12}, "disk"),
        ({"disk": 1e5, "remote": 1e12}, "remote"),
        ({"disk": 1e5, "remote": 1e5}, "host"),
        ({}, "host"),
    ],
)
def test_a_new_chunk_goes_to_the_cheapest_tier_whose_loading_hides(speeds: dict[str, float], tier: str) -> None:
    controller = measured()
    controller.speeds.update({name: TierSpeed(speed, 0.0, 0.0) for name, speed in speeds.items()})
    assert controller.tier_for(TOKENS, CHUNK_BYTES, 0.15, 0.0) == tier


def test_no_tier_is_preferred_before_computing_was_measured() -> None:
    controller = Controller(LAYERS)
    assert (controller.tier_for(TOKENS, CHUNK_BYTES, 0.15, 0.0), controller.cost_s(TOKENS)) == ("", 0.0)


def test_a_chunk_is_worth_the_seconds_that_computing_it_takes() -> None:
    assert measured().cost_s(TOKENS) == pytest.approx(TOKENS * ROW_S)


def test_the_model_is_a_pipeline_layer_by_layer() -> None:
    # two layers of one second each, the last one a quarter; loading takes two seconds a layer
    work = Work(ev.BlendShape(full_layers=2), 2, 0.02, 100, 0, 0.15, 4.0)
    assert work.layers_s() == pytest.approx([1.0, 0.25])
    assert work.first_token_s() == pytest.approx(4.25)
    assert replace(work, load_s=0.0).first_token_s() == pytest.approx(1.25)


def test_a_selector_that_waits_computes_its_last_pass_behind_the_loading() -> None:
    work = Work(QUERY, 2, 0.02, 100, 10, 0.5, 4.0)
    assert work.first_token_s() == pytest.approx(4.0 + 0.25 * 0.1 + 60 * 0.02)


@settings(max_examples=60)
@given(
    load_s=floats(0.0, 60.0),
    row_s=floats(1e-6, 0.05),
    cached=integers(1, 20_000),
    fresh=integers(1, 2000),
    floor=floats(0.0, 1.0),
    layers=integers(2, 60),
    off=floats(1.0 - MARGIN, 1.0 + MARGIN),
)
def test_auto_is_never_slower_than_the_floor_on_a_tier_and_a_device_near_what_was_measured(
    load_s: float, row_s: float, cached: int, fresh: int, floor: float, layers: int, off: float
) -> None:
    guessed = Work(DIVERGENCE, layers, row_s, cached, fresh, floor, load_s)
    ratio = raise_ratio(guessed)
    assert floor <= ratio <= 1.0
    # what happens then: computing is up to MARGIN slower, or loading up to MARGIN faster, than was thought
    true = replace(guessed, row_s=row_s * max(1.0, off), load_s=load_s * min(1.0, off))
    assert replace(true, ratio=ratio).first_token_s() <= true.first_token_s() * (1.0 + LATER_MAX) + 1e-9


@settings(max_examples=60)
@given(
    speed=floats(1e4, 1e10),
    row_s=floats(1e-5, 0.05),
    shape=sampled_from([DIVERGENCE, QUERY]),
    chunks=integers(1, 6),
)
def test_computing_instead_never_costs_more_than_a_full_prefill_or_the_loading(
    speed: float, row_s: float, shape: ev.BlendShape, chunks: int
) -> None:
    question = job(shape, chunks)
    found = hits("disk", chunks)
    controller = measured(row_s)
    choice = controller.choose(question, found, {"disk": TierSpeed(speed, 0.0, 0.0)}, 0.0, 1)
    left = [hit for hit in found if hit.segment not in choice.computed]
    load_s = sum(hit.num_bytes for hit in left) / speed
    plain = controller._work(question, found, 0.15, sum(hit.num_bytes for hit in found) / speed, row_s)
    chosen = controller._work(question, left, 0.15, load_s, row_s)
    assert chosen.first_token_s() <= plain.first_token_s() + 1e-9
    assert not choice.computed or chosen.compute_s <= question.layout.num_tokens * row_s + 1e-9
