"""Who is in the next step, and what its results mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_driver import REPORT, SYSTEM, A, B, C, Driver, generate, key_of, result, store

from kvblend.actors.core import events as ev
from kvblend.actors.messages import Delta, Failed, Finished, TokenLogprob
from kvblend.engine.layout import Reuse


def items(driver: Driver) -> list[tuple[str, int]]:
    (step,) = driver.of(ev.RunStep)
    return [(item.request_id, item.rows_max) for item in step.items]


def decoding(driver: Driver, *names: str) -> None:
    """Requests without chunks that have their first token."""
    for name in names:
        driver.begin(generate(name, mode="full", max_tokens=9))
    while not all(driver.entry(name).output_tokens for name in names):
        members = driver.state.step or ()
        driver.step(*(result(n, "sampled", prefill=REPORT) for n in members))


def test_decoding_rows_come_first_and_prefills_share_what_is_left() -> None:
    driver = Driver(max_num_batched_tokens=12)
    decoding(driver, "a", "b")
    driver.begin(generate("c", A, mode="full"))
    driver.begin(generate("d", B, mode="full"))
    driver.step(result("a", "sampled"), result("b", "sampled"))
    assert items(driver) == [("a", 1), ("b", 1), ("c", 9), ("d", 1)]


def test_one_step_runs_at_a_time() -> None:
    driver = Driver()
    driver.begin(generate("a"))
    driver.begin(generate("b"))
    assert driver.of(ev.RunStep) == []


def test_steps_are_numbered_apart() -> None:
    driver = Driver()
    driver.begin(generate("a"))
    first = driver.state.step_number
    driver.step(result("a", "running"))
    assert driver.state.step_number != first


def test_a_stalled_request_leaves_the_steps_until_its_layer_is_there() -> None:
    driver = Driver()
    driver.begin(generate("a", A), exact=(0, 1))
    driver.step(result("a", "stalled"))
    assert driver.of(ev.RunStep) == []
    driver.do(ev.Unstalled("a", 3.0))
    assert items(driver) == [("a", 9)]


def test_the_news_of_a_step_that_is_no_longer_awaited_is_ignored() -> None:
    driver = Driver()
    driver.begin(generate("a"))
    driver.do(ev.StepDone(driver.state.step_number + 1, (result("a", "sampled", prefill=REPORT),), 1.0, 3.0))
    assert driver.commands == []
    assert driver.state.step == ("a",)


def test_what_a_lost_step_captured_for_a_job_that_has_ended_is_dropped() -> None:
    driver = Driver()
    driver.begin(generate("a", A))
    number = driver.state.step_number
    driver.crash("blender")
    driver.do(ev.StepDone(number, (result("a", "sampled", prefill=REPORT),), 1.0, 3.0))
    assert driver.commands == [ev.Release("a")]


def test_a_request_that_the_device_left_unasked_fails() -> None:
    driver = Driver()
    driver.begin(generate("a"))
    driver.step(result("a", "cancelled"))
    assert isinstance(driver.terminal(), Failed)


def test_a_request_that_the_device_does_not_know_fails() -> None:
    driver = Driver()
    driver.begin(generate("a"))
    driver.step()
    assert isinstance(driver.terminal(), Failed)
    assert driver.of(ev.RunStep) == []


def test_a_failed_row_fails_its_request_alone() -> None:
    driver = Driver()
    decoding(driver, "a", "b")
    driver.step(result("a", "failed", error="logits are NaN"), result("b", "sampled"))
    assert driver.terminal() == Failed("a", "internal", "logits are NaN")
    assert items(driver) == [("b", 1)]


def test_a_finished_prompt_hands_its_chunks_to_the_store_and_then_closes_its_leases() -> None:
    driver = Driver()
    driver.begin(generate("r", A), exact=(0,))
    driver.prefill()
    kinds = [type(command) for command in driver.commands[:2]]
    assert kinds == [ev.StoreSegment, ev.Release]
    assert driver.of(ev.StoreSegment) == [ev.StoreSegment("r", 1, key_of(A), A)]


def test_a_missing_system_prompt_is_stored_too() -> None:
    driver = Driver()
    driver.begin(generate("r", A))
    driver.prefill()
    assert {command.key for command in driver.of(ev.StoreSegment)} == {key_of(SYSTEM, ()), key_of(A)}


def test_the_first_token_lets_the_missed_chunks_be_computed() -> None:
    driver = Driver()
    driver.begin(generate("r", A, B, C))
    driver.prefill()
    assert len(driver.looked_up_ids()) == 2


def test_ids_without_text_go_out_with_the_next_text() -> None:
    driver = Driver()
    decoding(driver, "a")
    driver.step(result("a", "sampled", text=""))
    assert driver.emitted() == []
    driver.step(result("a", "sampled", text="né"))
    assert driver.emitted() == [Delta("a", "né", (5, 5))]


def test_log_probabilities_of_silent_tokens_go_out_with_the_next_text() -> None:
    driver = Driver()
    decoding(driver, "a")
    first, second = TokenLogprob(5, -1.0), TokenLogprob(5, -2.0)
    driver.step(result("a", "sampled", text="", logprob=first))
    driver.step(result("a", "sampled", text="né", logprob=second))
    assert driver.emitted() == [Delta("a", "né", (5, 5), (first, second))]


def test_the_log_probability_of_an_end_token_is_not_lost() -> None:
    driver = Driver()
    decoding(driver, "a")
    end = TokenLogprob(5, -1.0)
    driver.step(result("a", "sampled", text="", stopped=True, logprob=end))
    assert driver.emitted()[0] == Delta("a", "", (5,), (end,))


def test_a_stop_ends_the_request_after_its_text() -> None:
    driver = Driver()
    decoding(driver, "a")
    driver.step(result("a", "sampled", text="end", stopped=True))
    delta, end = driver.emitted()
    assert isinstance(delta, Delta)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.output_tokens) == ("stop", 2)


def test_the_last_token_allowed_ends_with_length() -> None:
    driver = Driver()
    driver.begin(generate("a", max_tokens=1))
    driver.prefill("a")
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert end.reason == "length"


def wrong_keys(driver: Driver) -> None:
    driver.begin(generate("r", A, B, C, max_tokens=1), exact=(0, 1), cached=(2, 3))
    driver.step(result("r", "sampled", prefill=replace(REPORT, parity_error=0.5)))


def test_stored_keys_that_differ_from_fresh_ones_say_nothing_and_are_dropped() -> None:
    driver = Driver()
    wrong_keys(driver)
    assert driver.emitted() == []
    (drop,) = driver.of(ev.DropChunks)
    assert (drop.request_id, drop.segments) == ("r", (2, 3))
    names = [type(command).__name__ for command in driver.commands]
    assert names.index("DropChunks") < names.index("Release"), "the leases name the chunks"
    assert driver.state.parity_failures == 1


def test_behind_wrong_keys_the_answer_is_computed_without_anything_stored() -> None:
    driver = Driver()
    wrong_keys(driver)
    assert driver.looked_up_ids() == ["r"]
    driver.look_up("r", exact=(0, 1), cached=(2, 3))
    assert driver.of(ev.StartSequence)[0].plan.count(Reuse.FRESH) == driver.entry("r").job.layout.num_tokens
    driver.prefill("r")
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert any("layer 0" in note and "dropped" in note for note in end.usage.notes)


def test_keys_that_differ_by_rounding_are_taken() -> None:
    driver = Driver()
    driver.begin(generate("r", A, B, max_tokens=1), exact=(0, 1), cached=(2,))
    driver.step(result("r", "sampled", prefill=replace(REPORT, parity_error=0.005)))
    assert isinstance(driver.terminal(), Finished)
    assert driver.state.parity_failures == 0


def test_a_jobs_note_is_said_with_its_figures() -> None:
    driver = Driver()
    driver.begin(replace(generate("r", A, max_tokens=1), note="served otherwise"))
    driver.prefill("r")
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert end.usage.notes == ("served otherwise",)


def prefilled(driver: Driver, compute_ms: float, *others: str) -> None:
    report = ev.PrefillReport(0, 0, 100, 1.0, 0.0)
    done = [result("r", "sampled", prefill=report), *(result(name, "running") for name in others)]
    driver.do(ev.StepDone(driver.state.step_number, tuple(done), compute_ms, 3.0))


def test_a_prefill_that_had_the_device_to_itself_tells_how_fast_it_computes() -> None:
    driver = Driver()
    driver.begin(generate("r", A))
    prefilled(driver, 200.0)
    assert driver.state.controller.compute.row_s == pytest.approx(0.002)


def test_a_prefill_that_shared_its_steps_tells_nothing() -> None:
    driver = Driver()
    driver.begin(generate("other", B))
    driver.submit(generate("r", A))
    driver.step(result("other", "running"))
    driver.look_up("r")
    driver.step(result("other", "running"))
    prefilled(driver, 200.0, "other")
    assert driver.state.controller.compute.row_s is None


def test_what_is_stored_goes_with_its_worth_and_the_tier_for_it() -> None:
    driver = Driver(num_layers=2, layer_token_bytes=10)
    driver.state.controller.compute.note(100.0, 1.0, blend=True)
    driver.begin(generate("r", A))
    prefilled(driver, 0.0)
    (head, _) = driver.of(ev.StoreSegment)
    assert head.cost_s == pytest.approx(len(head.token_ids) * 0.01)
    assert head.tier == "host"
    assert driver.entry("r").usage(4.0).loading.store_tier == "host"


def test_a_chunk_that_was_computed_alone_is_worth_what_that_took() -> None:
    driver = Driver()
    driver.begin(store("r", A), exact=(0,))
    report = ev.PrefillReport(3, 0, len(A), 1.0, 0.0)
    driver.do(ev.StepDone(driver.state.step_number, (result("r", "prefilled", prefill=report),), 80.0, 3.0))
    (command,) = driver.of(ev.StoreSegment)
    assert command.cost_s == pytest.approx(0.08)
