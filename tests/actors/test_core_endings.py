"""Ends: cancelled, failed, finished, stored or not; and what a crash takes with it."""

from __future__ import annotations

from core_driver import REPORT, SYSTEM, A, B, Driver, generate, key_of, result, store

from kvblend.actors.core import events as ev
from kvblend.actors.messages import Failed, Finished

LOST = "the {} failed and was restarted"


def storing(driver: Driver, name: str = "s") -> None:
    """A document whose KV is on its way to the store."""
    driver.begin(store(name, A), exact=(0,))
    driver.prefill(name)


def test_a_queued_request_is_cancelled_at_once() -> None:
    driver = Driver()
    driver.submit(generate())
    driver.cancel()
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert (end.reason, end.detail) == ("cancelled", "enough")
    assert driver.state.idle


def test_a_request_within_a_step_is_flagged_and_ends_after_it() -> None:
    driver = Driver()
    driver.begin(generate())
    driver.cancel()
    assert driver.commands == [ev.FlagCancelled("r")]
    driver.step(result("r", "running"))
    assert isinstance(driver.terminal(), Finished)
    assert driver.of(ev.FreeSequence) == [ev.FreeSequence("r")]


def test_a_token_that_comes_after_a_cancel_is_not_handed_on() -> None:
    driver = Driver()
    driver.begin(generate("r", A))
    driver.cancel()
    driver.step(result("r", "sampled", prefill=REPORT))
    assert len(driver.emitted()) == 1
    assert driver.of(ev.StoreSegment) == []
    assert driver.state.idle


def test_a_second_cancel_changes_nothing() -> None:
    driver = Driver()
    driver.begin(generate())
    driver.cancel()
    driver.cancel(deadline=True)
    assert driver.commands == []
    driver.step(result("r", "cancelled"))
    assert isinstance(driver.terminal(), Finished)


def test_a_deadline_fails_by_name() -> None:
    driver = Driver()
    driver.submit(generate())
    driver.cancel(deadline=True)
    assert driver.terminal() == Failed("r", "deadline_exceeded", "enough")


def test_cancelling_who_is_unknown_or_has_ended_does_nothing() -> None:
    driver = Driver()
    driver.cancel("nobody")
    assert driver.commands == []


def test_a_chunk_on_its_way_to_the_store_is_past_cancelling() -> None:
    driver = Driver()
    storing(driver)
    driver.cancel("s")
    assert driver.commands == []
    driver.stored("s", key_of(A))
    assert isinstance(driver.terminal(), Finished)


def test_a_document_is_finished_when_it_is_durable_and_its_slots_are_free_before() -> None:
    driver = Driver()
    storing(driver)
    assert driver.emitted() == []
    assert driver.of(ev.FreeSequence) == [ev.FreeSequence("s")]
    assert driver.state.pages_used == 0
    driver.stored("s", key_of(A))
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert (end.chunks[0].id, end.chunks[0].created) == (key_of(A).id, True)


def test_a_document_waits_for_its_system_prompt_too() -> None:
    driver = Driver()
    driver.begin(store("s", A))
    driver.prefill("s")
    driver.stored("s", key_of(A))
    assert driver.emitted() == []
    driver.stored("s", key_of(SYSTEM, ()))
    assert isinstance(driver.terminal(), Finished)


def test_a_document_that_cannot_be_written_fails_with_the_reason() -> None:
    driver = Driver()
    storing(driver)
    driver.stored("s", key_of(A), "not stored: no space left on device")
    assert driver.terminal() == Failed("s", "internal", "not stored: no space left on device")
    assert driver.state.idle


def test_an_answer_is_right_though_its_chunk_cannot_be_written() -> None:
    driver = Driver()
    driver.begin(generate("r", A, max_tokens=2), exact=(0,))
    driver.prefill()
    driver.stored("r", key_of(A), "not stored: no space left on device")
    driver.step(result("r", "sampled"))
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert end.usage.notes == ("not stored: no space left on device",)


def test_a_chunk_that_is_being_written_is_not_computed_again_though_its_job_has_ended() -> None:
    driver = Driver()
    driver.begin(generate("r", A, max_tokens=1), exact=(0,))
    driver.prefill()
    driver.submit(generate("next", A))
    driver.look_up("next", exact=(0,))
    assert driver.entry("next").waits == {key_of(A)}
    driver.stored("r", key_of(A))
    assert driver.looked_up_ids() == ["next"]


def test_late_news_of_a_write_does_not_take_the_key_from_who_computes_it_now() -> None:
    driver = Driver()
    driver.begin(generate("r", A, max_tokens=1), exact=(0,))
    driver.prefill()
    driver.crash("loader")
    driver.begin(generate("next", A), exact=(0,))
    driver.stored("r", key_of(A))
    assert driver.state.inflight == {key_of(A): "next"}


def test_late_news_of_a_write_is_not_counted_twice() -> None:
    driver = Driver()
    driver.begin(generate("r", A), exact=(0,))
    driver.prefill()
    driver.crash("loader")
    driver.stored("r", key_of(A))
    assert driver.entry().stores_left == 0


def test_jobs_queued_behind_an_answer_that_never_came_are_dropped() -> None:
    driver = Driver()
    driver.begin(generate("r", A, B))
    driver.cancel()
    driver.step(result("r", "cancelled"))
    assert driver.state.idle


def test_a_queued_job_that_somebody_else_waits_for_is_kept() -> None:
    driver = Driver()
    driver.begin(generate("r", A, B), exact=(0, 1))
    driver.submit(store("s", B))
    driver.look_up("s", exact=(0,))
    driver.cancel()
    driver.step(result("r", "cancelled"))
    (name,) = driver.looked_up_ids()
    assert name.startswith("/precompute/")
    driver.look_up(name, exact=(0,))
    driver.do(ev.FirstLayerLoaded(name, 2.0))
    driver.prefill(name)
    driver.stored(name, key_of(B))
    assert driver.looked_up_ids() == ["s"]


def test_a_crashed_blender_fails_what_it_computed_and_nothing_else() -> None:
    driver = Driver()
    driver.begin(generate("a", A))
    driver.submit(generate("b", B), generate("c"))
    driver.crash("blender")
    assert driver.terminal() == Failed("a", "internal", LOST.format("blender"))
    assert set(driver.state.entries) == {"b", "c"}
    assert driver.state.step is None


def test_a_document_that_is_being_written_survives_the_blender() -> None:
    driver = Driver()
    storing(driver)
    driver.crash("blender")
    driver.stored("s", key_of(A))
    assert isinstance(driver.terminal(), Finished)


def test_a_cancelled_request_ends_though_its_step_was_lost() -> None:
    driver = Driver()
    driver.begin(generate())
    driver.cancel()
    driver.crash("blender")
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"


def test_a_crashed_loader_fails_who_is_looked_up_and_who_loads() -> None:
    driver = Driver()
    driver.submit(generate("loads", A), generate("asks", B))
    driver.look_up("loads", exact=(0, 1))
    driver.step(result("loads", "stalled"))
    driver.crash("loader")
    failed = {event.request_id: event for event in driver.emitted() if isinstance(event, Failed)}
    assert set(failed) == {"loads", "asks"}
    assert {event.message for event in failed.values()} == {LOST.format("loader")}


def test_a_crashed_loader_lets_decoding_requests_go_on() -> None:
    driver = Driver()
    driver.begin(generate("r", A), exact=(0, 1))
    driver.prefill()
    driver.crash("loader")
    assert driver.emitted() == []
    driver.step(result("r", "sampled", stopped=True))
    assert isinstance(driver.terminal(), Finished)


def test_who_loads_within_a_step_fails_after_it_when_the_loader_crashes() -> None:
    driver = Driver()
    driver.begin(generate("r", A), exact=(0, 1))
    driver.crash("loader")
    assert driver.commands == [ev.FlagCancelled("r")]
    driver.step(result("r", "stalled"))
    assert driver.terminal() == Failed("r", "internal", LOST.format("loader"))


def test_a_write_lost_with_the_loader_frees_its_key_at_once() -> None:
    driver = Driver()
    driver.begin(generate("r", A), exact=(0,))
    driver.prefill()
    driver.submit(generate("next", A))
    driver.look_up("next", exact=(0,))
    driver.crash("loader")
    assert driver.looked_up_ids() == ["next"]
    assert "r" in driver.state.entries


def test_a_write_of_a_job_that_has_ended_is_given_up_with_the_loader() -> None:
    driver = Driver()
    driver.begin(generate("r", A, max_tokens=1), exact=(0,))
    driver.prefill()
    assert not driver.state.idle
    driver.crash("loader")
    assert driver.state.idle


def test_a_document_that_was_being_written_fails_with_the_loader() -> None:
    driver = Driver()
    storing(driver)
    driver.crash("loader")
    assert driver.terminal() == Failed("s", "internal", LOST.format("loader"))
