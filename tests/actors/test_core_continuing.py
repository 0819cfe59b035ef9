"""The next turn of a conversation begins with the KV that the last one left on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_driver import KIND, QUESTION, REPORT, SYSTEM, A, B, Driver, generate, result

from kvblend.actors.core import events as ev
from kvblend.actors.core.conditioning import Conditioning
from kvblend.actors.core.planning import segment_keys
from kvblend.actors.messages import Finished, Mode
from kvblend.engine.layout import PromptLayout, Reuse

# the model's double says 5 each time; the last of its tokens never goes through the model
SAID = (5, 5, 5)
MORE = (40, 41, 42)


def driver(**limits: Any) -> Driver:
    return Driver(**{"kept_pages_max": 50, **limits})


def answer(driver: Driver, job: ev.Job, exact: tuple[int, ...] = (), cached: tuple[int, ...] = ()) -> None:
    """Run a job to its end: four tokens."""
    driver.begin(job, exact, cached)
    driver.step(result(job.request_id, "sampled", prefill=REPORT))
    for _ in range(3):
        driver.step(result(job.request_id, "sampled"))


def next_turn(name: str = "next", *chunks: tuple[int, ...], mode: Mode = "blend", ratio: float = 0.5) -> ev.Job:
    """The same prompt with what was said and a new message behind it."""
    tail = (*QUESTION, *SAID, *MORE)
    parts = [(KIND.SYSTEM, SYSTEM), *((KIND.CHUNK, chunk) for chunk in chunks), (KIND.QUESTION, tail)]
    layout = PromptLayout.of(parts)
    return replace(
        generate(name, *chunks, mode=mode, ratio=ratio),
        layout=layout,
        keys=segment_keys(layout, mode, Conditioning(), "m", ""),
    )


def started(driver: Driver, job: ev.Job, exact: tuple[int, ...] = (), cached: tuple[int, ...] = ()) -> ev.StartSequence:
    """Submit a job whose segments are found so; how it starts."""
    driver.submit(job)
    driver.look_up(job.request_id, exact, cached)
    (command,) = driver.of(ev.StartSequence)
    return command


def test_the_slots_of_a_finished_answer_are_not_freed() -> None:
    subject = driver()
    answer(subject, generate("r", A))
    assert isinstance(subject.terminal(), Finished)
    assert subject.of(ev.FreeSequence) == []


def test_the_next_turn_starts_from_them_and_computes_only_what_is_new() -> None:
    subject = driver()
    answer(subject, generate("r", A, B))
    command = started(subject, next_turn("next", A, B))
    kept = len(SYSTEM + A + B + QUESTION) + len(SAID)
    assert command.continues == ("r", kept)
    assert command.plan.reuse == (Reuse.EXACT, Reuse.FRESH)
    assert command.plan.count(Reuse.FRESH) == len(MORE)


def test_its_figures_say_what_was_kept() -> None:
    subject = driver()
    answer(subject, generate("r", A, B))
    subject.begin(next_turn("next", A, B))
    usage = subject.entry("next").usage(9.0)
    assert (usage.chunk_hits, usage.chunk_misses, usage.tiers) == (2, 0, {"device": 2})
    assert usage.tokens_reused == usage.tier_tokens["device"] == len(SYSTEM + A + B + QUESTION) + len(SAID)
    assert "was kept, exact" in usage.notes[0]


def test_leases_of_a_prompt_that_goes_on_are_closed() -> None:
    subject = driver()
    answer(subject, generate("r", A), exact=(0, 1))
    subject.submit(next_turn("next", A))
    subject.look_up("next", exact=(0, 1))
    assert subject.of(ev.StartLoading) == [ev.StartLoading("next", ())]


def test_blended_kv_is_continued_by_requests_of_the_same_blend_only() -> None:
    for mode, ratio, goes_on in [("blend", 0.5, True), ("blend", 0.25, False), ("prefix", 0.5, False)]:
        subject = driver()
        answer(subject, generate("r", A, B), exact=(0,), cached=(1, 2))
        start = started(subject, next_turn("next", A, B, mode=mode, ratio=ratio), (0,), (1, 2))  # type: ignore[arg-type]
        assert (start.continues is not None) is goes_on, mode


def test_a_blended_context_stays_blended_over_turns() -> None:
    subject = driver()
    answer(subject, generate("r", A, B), exact=(0,), cached=(1, 2))
    answer(subject, next_turn("next", A, B))
    (kept,) = subject.state.continuing.kept
    assert kept.request_id == "next"
    assert kept.origin.blend is not None


@pytest.mark.parametrize("mode", ["blend", "prefix", "reuse"])
def test_exact_kv_is_continued_by_every_mode_that_reuses(mode: Mode) -> None:
    subject = driver()
    answer(subject, generate("r", A, mode="full"))
    assert started(subject, next_turn("next", A, mode=mode)).continues is not None


def test_a_full_prefill_begins_with_nothing() -> None:
    subject = driver()
    answer(subject, generate("r", A), exact=(0, 1))
    assert started(subject, next_turn("next", A, mode="full"), (0, 1)).continues is None


def test_nothing_is_continued_across_salts() -> None:
    subject = driver()
    answer(subject, replace(generate("r", A), salt="one"), exact=(0, 1))
    assert started(subject, replace(next_turn("next", A), salt="two"), exact=(0, 1)).continues is None


def test_nothing_is_continued_with_another_rotation() -> None:
    subject = driver()
    answer(subject, replace(generate("r", A), regime=(1,)), exact=(0, 1))
    assert started(subject, replace(next_turn("next", A), regime=(2,)), exact=(0, 1)).continues is None


def test_the_next_turn_takes_the_place_of_the_last() -> None:
    subject = driver()
    answer(subject, generate("r", A))
    answer(subject, next_turn("next", A))
    assert subject.of(ev.FreeSequence) == [ev.FreeSequence("r")]


def test_who_needs_room_gets_the_pages_of_kept_sequences() -> None:
    subject = driver(pages=5, kept_pages_max=5)
    answer(subject, generate("r", A))
    assert subject.state.pages_used == 4
    subject.submit(generate("other", B))
    assert subject.commands[0] == ev.FreeSequence("r")
    assert subject.looked_up_ids() == ["other"]


def test_a_cancelled_answer_is_not_kept() -> None:
    subject = driver()
    subject.begin(generate("r", A))
    subject.step(result("r", "sampled", prefill=REPORT))
    subject.cancel()
    subject.step(result("r", "sampled"))
    assert subject.of(ev.FreeSequence) == [ev.FreeSequence("r")]


def test_a_crash_of_the_blender_takes_them_all() -> None:
    subject = driver()
    answer(subject, generate("r", A))
    subject.crash("blender")
    assert subject.state.pages_used == 0
    assert started(subject, next_turn("next", A), (0, 1)).continues is None


def test_a_bound_of_the_kl_is_not_carried_from_turn_to_turn() -> None:
    subject = driver()
    answer(subject, generate("r", A), exact=(0, 1))
    job = next_turn("next", A)
    assert started(subject, replace(job, options=replace(job.options, max_kl=0.1)), (0, 1)).continues is None


def test_nothing_is_kept_where_nothing_may_be() -> None:
    subject = driver(kept_pages_max=0)
    answer(subject, generate("r", A))
    assert subject.of(ev.FreeSequence) == [ev.FreeSequence("r")]
    assert subject.state.pages_used == 0


def test_what_is_stored_and_exact_goes_before_what_was_kept_where_it_reaches_further() -> None:
    subject = driver()
    answer(subject, generate("r", max_tokens=4))
    (kept,) = subject.state.continuing.kept
    subject.state.continuing.kept.drop(kept.request_id)
    subject.state.continuing.kept.keep(replace(kept, token_ids=kept.token_ids[:1], turns=(1,)))
    assert started(subject, next_turn("next"), (0,)).continues is None


def test_kv_of_a_ratio_that_load_had_lowered_is_not_kept() -> None:
    subject = driver(ratio_lever_floor=0.1)
    subject.begin(generate("r", A, B), (0,), (1, 2))
    entry = subject.entry()
    entry.loading = replace(entry.loading, ratio_lowered_from=0.5)
    subject.step(result("r", "sampled", prefill=REPORT))
    for _ in range(3):
        subject.step(result("r", "sampled"))
    assert subject.of(ev.FreeSequence) == [ev.FreeSequence("r")]


def lost_turn(**limits: Any) -> Driver:
    """The next turn has begun on a device that has nothing of the first."""
    subject = driver(**limits)
    answer(subject, generate("r", A, B), exact=(0, 1, 2))
    assert started(subject, next_turn("next", A, B), (0, 1), (2,)).continues is not None
    subject.step(result("next", "lost"))
    return subject


def test_a_turn_whose_beginning_the_device_has_lost_is_planned_as_if_nothing_had_been_kept() -> None:
    subject = lost_turn()
    assert [command.job for command in subject.of(ev.Lookup)] == [next_turn("next", A, B)]
    subject.look_up("next", (0, 1), (2,))
    (start,) = subject.of(ev.StartSequence)
    assert start.continues is None
    assert start.plan.reuse == (Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH)


def test_its_slots_are_freed_before_it_starts_again() -> None:
    assert ev.FreeSequence("next") in lost_turn().commands


def test_what_the_device_has_lost_is_kept_no_longer() -> None:
    subject = lost_turn()
    assert list(subject.state.continuing.kept) == []
    assert subject.state.pages_used == subject.entry("next").pages


def test_its_figures_say_that_it_was_planned_again() -> None:
    subject = lost_turn()
    subject.look_up("next", (0, 1), (2,))
    usage = subject.entry("next").usage(9.0)
    assert usage.notes[-1] == "planned again: the KV of its earlier turn is not on the device any more"
    assert "device" not in usage.tiers
    assert (usage.chunk_hits, usage.chunk_misses) == (2, 0)


def test_a_turn_that_was_cancelled_meanwhile_ends() -> None:
    subject = driver()
    answer(subject, generate("r", A))
    subject.begin(next_turn("next", A))
    subject.cancel("next")
    subject.step(result("next", "lost"))
    end = subject.terminal()
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    assert "next" not in subject.state.entries
