"""Streams beside prompts, on a device of which every row takes its time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from core_driver import generate, store
from timed_world import Model, TimedWorld

from kvblend.actors.core import events as ev
from kvblend.actors.core.limits import Limits
from kvblend.actors.core.ordering import SKIPPED_MAX
from kvblend.actors.messages import Failed, Finished

BOUND_MS = 60.0


def world(cached: bool = False, model: Model | None = None, **limits: Any) -> TimedWorld:
    given = model or Model()
    values = {"pages": 1 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 8192, "blend_min_tokens": 0}
    return TimedWorld(Limits(**{**values, "num_layers": given.num_layers, **limits}), given, cached)


def ids(count: int, first: int = 100) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def prompt(name: str, tokens: int, max_tokens: int = 1, **more: Any) -> ev.Job:
    return replace(generate(name, ids(tokens), mode="full", max_tokens=max_tokens), **more)


def streams(world: TimedWorld, count: int = 2, tokens: int = 200) -> list[str]:
    """Answers that are being given for a while, short prompts that teach what computing takes."""
    names = [f"s{n}" for n in range(count)]
    for name in names:
        world.submit(prompt(name, 50, tokens))
    return names


def late_steps(world: TimedWorld, since_ms: float) -> list[float]:
    return [step.ms for step in world.steps if step.decoding and step.at_ms >= since_ms]


@pytest.mark.parametrize("model", [Model(), Model(num_layers=30, row_layer_ms=0.003), Model(far=3000)])
def test_a_long_prompt_beside_running_answers_keeps_them_within_the_bound(model: Model) -> None:
    beside = world(model=model, itl_ms_max=BOUND_MS)
    streams(beside)
    beside.submit(prompt("long", 6000), 300.0)
    beside.run()
    assert isinstance(beside.ends["long"], Finished)
    assert max(late_steps(beside, 300.0)) <= BOUND_MS


def test_a_blend_beside_running_answers_keeps_them_within_the_bound() -> None:
    beside = world(cached=True, itl_ms_max=BOUND_MS)
    streams(beside)
    chunks = [ids(1000, 1000 * n) for n in range(1, 5)]
    beside.submit(generate("blend", *chunks, ratio=0.15, max_tokens=2), 300.0)
    beside.run()
    assert max(late_steps(beside, 300.0)) <= BOUND_MS
    assert beside.prompts["blend"].done < 0.4 * 4000 * 10, "it is a blend"


def test_what_the_bound_leaves_is_used() -> None:
    beside = world(itl_ms_max=BOUND_MS)
    streams(beside)
    beside.submit(prompt("long", 6000), 300.0)
    beside.run()
    beside_it = [step.ms for step in beside.steps if step.decoding and "long" in step.work]
    assert sum(beside_it) / len(beside_it) > 0.75 * BOUND_MS


def test_without_a_bound_a_step_takes_what_it_takes() -> None:
    free = world(itl_ms_max=None)
    streams(free)
    free.submit(prompt("long", 6000), 300.0)
    free.run()
    assert max(late_steps(free, 300.0)) > 500.0


def test_without_running_answers_steps_are_whole() -> None:
    alone = world(itl_ms_max=BOUND_MS)
    alone.submit(prompt("first", 500))
    alone.submit(prompt("long", 6000), 1000.0)
    alone.run()
    assert alone.steps[-1].work == {"long": 60050}, "all rows through all layers at once"


def test_prefills_go_on_in_every_step_though_decoding_takes_all_of_the_bound() -> None:
    tight = world(itl_ms_max=BOUND_MS, model=Model(decode_ms=100.0))
    streams(tight, 3, 400)
    tight.submit(prompt("long", 3000, 1), 1000.0)
    tight.run()
    beside = [step for step in tight.steps if step.at_ms > tight.steps[0].ms + 1000.0 and not step.work]
    first = tight.tokens_ms["long"][0]
    assert [step for step in beside if step.at_ms < first] == [], "each step until then has some of it"


def test_every_running_answer_has_a_row_in_every_step() -> None:
    beside = world(itl_ms_max=BOUND_MS)
    names = streams(beside, 4)
    beside.submit(prompt("long", 6000), 300.0)
    beside.run()
    for name in names:
        assert max(beside.itl_ms(name)[30:]) <= BOUND_MS


def test_chunks_computed_for_later_slow_running_answers_no_more_than_prompts_do() -> None:
    beside = world(itl_ms_max=BOUND_MS)
    streams(beside)
    for n in range(3):
        beside.submit(store(f"doc{n}", ids(2000, 3000 * n)), 300.0)
    beside.run()
    assert max(late_steps(beside, 300.0)) <= BOUND_MS
    assert all(isinstance(beside.ends[f"doc{n}"], Finished) for n in range(3))


def test_chunks_computed_for_later_stand_back_while_prompts_are_due_but_for_every_ninth_step() -> None:
    busy = world(itl_ms_max=BOUND_MS)
    streams(busy, 1, 400)
    busy.submit(store("doc", ids(500)), 250.0)
    for n in range(12):
        busy.submit(prompt(f"q{n}", 2000), 250.0)
    busy.run()
    shared = [step for step in busy.steps if any(name.startswith("q") for name in step.work)]
    with_doc = [index for index, step in enumerate(shared) if "doc" in step.work]
    assert with_doc
    assert min(b - a for a, b in itertools.pairwise(with_doc)) == SKIPPED_MAX + 1


def test_a_deadline_that_the_queue_makes_impossible_is_refused_at_once() -> None:
    full = world(max_num_seqs=2)
    full.submit(prompt("first", 2000))
    for n in range(20):
        full.submit(prompt(f"q{n}", 2000, 8), 500.0)
    full.submit(prompt("late", 2000, deadline_ms=1000.0), 510.0)
    full.submit(prompt("patient", 2000, deadline_ms=60_000.0), 510.0)
    full.run()
    end = full.ends["late"]
    assert isinstance(end, Failed)
    assert (end.code, full.ends_ms["late"]) == ("overloaded", 510.0)
    assert "deadline_ms is 1000; the first token is expected in" in end.message
    assert isinstance(full.ends["patient"], Finished)


def test_a_forecast_is_about_right() -> None:
    full = world(max_num_seqs=2)
    full.submit(prompt("first", 2000, 8))
    for n in range(20):
        full.submit(prompt(f"q{n}", 2000, 8), 500.0)
    full.run(until_ms=505.0)
    queued = [entry for entry in full.state.entries.values() if not entry.pages]
    wait_s = full.state.forecast.first_token_s(prompt("next", 2000), full.state.running(), queued)
    full.submit(prompt("next", 2000), 505.0)
    full.run()
    assert wait_s is not None
    assert 1e3 * wait_s == pytest.approx(full.ttft_ms("next", 505.0), rel=0.25)


def test_the_earliest_deadline_goes_first() -> None:
    for policy, first in (("fcfs", "calm"), ("edf", "urgent")):
        queue = world(max_num_seqs=1, policy=policy)
        queue.submit(prompt("before", 1000, 20))
        queue.submit(prompt("calm", 1000, deadline_ms=90_000.0), 1.0)
        queue.submit(prompt("urgent", 1000, deadline_ms=2_000.0), 2.0)
        queue.run()
        assert queue.admitted[1] == first


def test_load_lowers_the_ratio_of_blends_and_an_idle_server_raises_it_again() -> None:
    lever = world(cached=True, max_num_seqs=2, ratio_lever_floor=0.05)
    for n in range(12):
        lever.submit(generate(f"q{n}", ids(800, 1000 * n + 1000), ratio=0.2, max_tokens=4), 10.0 * n)
    lever.submit(generate("calm", ids(800, 90_000), ratio=0.2, max_tokens=4), 60_000.0)
    lever.run()
    usages = {name: end.usage for name, end in lever.ends.items() if isinstance(end, Finished)}
    ratios = [usages[f"q{n}"].recompute_ratio for n in range(12)]
    assert min(ratios) < 0.1
    assert all(0.05 <= ratio <= 0.2 for ratio in ratios)
    pressed = usages[f"q{ratios.index(min(ratios))}"]
    assert pressed.loading.ratio_lowered_from == 0.2
    assert any(
        note == f"recompute_ratio 0.2 lowered to {min(ratios):g}: the server is loaded" for note in pressed.notes
    )
    assert (usages["calm"].recompute_ratio, usages["calm"].loading.ratio_lowered_from) == (0.2, None)
