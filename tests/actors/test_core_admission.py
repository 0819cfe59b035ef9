"""Room, look-ups, plans, and who waits for whom."""

from __future__ import annotations

from core_driver import SYSTEM, A, B, C, Driver, generate, key_of, result, store

from kvblend.actors.core import events as ev
from kvblend.actors.core.admission import REPLANS_MAX, WAIT_ROUNDS_MAX
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.messages import Failed, Finished, Planned


def precomputes(driver: Driver) -> list[str]:
    return [name for name, entry in driver.state.entries.items() if name.startswith("/precompute/") and entry.owns]


def test_a_job_that_fits_is_looked_up_at_once_with_its_pages_reserved() -> None:
    driver = Driver()
    driver.submit(generate("r", A))
    assert driver.looked_up_ids() == ["r"]
    assert driver.state.pages_used == 4


def test_nobody_overtakes_a_job_that_waits_for_room() -> None:
    driver = Driver(pages=6)
    driver.submit(generate("first", A), generate("big", A, B, C), generate("small"))
    assert driver.looked_up_ids() == []
    driver.cancel("first")
    assert driver.looked_up_ids() == ["big"]


def test_no_more_sequences_run_than_may() -> None:
    driver = Driver(max_num_seqs=1)
    driver.submit(generate("a"), generate("b"))
    assert driver.looked_up_ids() == []


def test_a_job_that_can_never_fit_fails_at_once_and_keeps_nobody_waiting() -> None:
    driver = Driver(pages=3)
    driver.submit(generate("r", A, B))
    assert driver.terminal() == Failed("r", "too_large", "it needs 5 KV pages of 4 tokens; there are 3 in all")
    driver.submit(generate("next"))
    assert driver.looked_up_ids() == ["next"]


def test_a_second_job_of_the_same_id_does_not_replace_the_first() -> None:
    driver = Driver()
    first = generate("r", A)
    driver.submit(first, generate("r", B))
    assert driver.entry().job is first


def test_the_sequence_is_started_before_its_layers_are_asked_for() -> None:
    driver = Driver()
    driver.submit(generate("r", A, B))
    driver.look_up(exact=(0, 1), cached=(2,))
    kinds = [type(command) for command in driver.commands]
    assert kinds == [ev.Emit, ev.StartSequence, ev.StartLoading, ev.RunStep]
    assert driver.of(ev.StartLoading)[0].segments == (0, 1, 2)
    assert isinstance(driver.emitted()[0], Planned)


def test_without_hits_the_prefill_starts_at_once() -> None:
    driver = Driver()
    driver.begin(generate("r", A))
    assert driver.of(ev.StartLoading) == [ev.StartLoading("r", ())]
    assert len(driver.of(ev.RunStep)) == 1


def test_a_job_waits_for_a_chunk_that_another_computes_and_others_pass_it() -> None:
    driver = Driver()
    driver.begin(generate("a", A))
    driver.submit(generate("b", A))
    driver.look_up("b")
    assert driver.entry("b").waits == {key_of(SYSTEM, ()), key_of(A)}
    assert driver.entry("b").pages == 0
    assert driver.of(ev.Release) == [ev.Release("b")]
    driver.submit(generate("c"))
    assert driver.looked_up_ids() == ["c"]


def test_a_stored_chunk_wakes_who_waited_for_it() -> None:
    driver = Driver()
    driver.begin(generate("a", A))
    driver.submit(generate("b", A))
    driver.look_up("b")
    driver.prefill("a")
    driver.stored("a", key_of(SYSTEM, ()))
    assert driver.looked_up_ids() == []
    driver.stored("a", key_of(A))
    assert driver.looked_up_ids() == ["b"]


def test_an_answer_waits_only_so_often_for_chunks_that_get_lost() -> None:
    driver = Driver()
    driver.submit(generate("b", A))
    for turn in range(WAIT_ROUNDS_MAX + 1):
        driver.begin(generate(f"a{turn}", A))
        driver.look_up("b")
        waiting = bool(driver.entry("b").waits)
        assert waiting == (turn < WAIT_ROUNDS_MAX)
        driver.cancel(f"a{turn}")
        driver.step(result(f"a{turn}", "cancelled"))


def test_a_job_that_stores_a_chunk_waits_as_long_as_another_computes_it() -> None:
    driver = Driver()
    driver.submit(store("s", A))
    driver.entry("s").rounds = WAIT_ROUNDS_MAX
    driver.begin(generate("a", A))
    driver.look_up("s", exact=(0,))
    assert driver.entry("s").waits == {key_of(A)}


def test_a_stored_document_finishes_without_work() -> None:
    driver = Driver()
    driver.submit(store("s", A))
    driver.look_up("s", exact=(0, 1))
    end = driver.terminal()
    assert isinstance(end, Finished)
    assert (end.chunks[0].created, end.chunks[0].id, end.chunks[0].tokens) == (False, key_of(A).id, 4)
    assert driver.of(ev.Release) == [ev.Release("s")]
    assert driver.state.idle


def test_missed_chunks_are_computed_after_the_first_token() -> None:
    driver = Driver()
    driver.begin(generate("r", A, B, C))
    assert len(precomputes(driver)) == 2
    assert driver.looked_up_ids() == []
    driver.prefill()
    assert driver.looked_up_ids() == precomputes(driver)


def test_on_miss_precompute_waits_for_the_missed_chunks_first() -> None:
    driver = Driver()
    driver.submit(generate("r", A, B, on_miss="precompute"))
    driver.look_up()
    assert driver.entry().waits == {key_of(B)}
    assert driver.looked_up_ids() == precomputes(driver)


def test_a_chunk_that_stands_twice_is_computed_once() -> None:
    driver = Driver()
    driver.begin(generate("r", B, A, A))
    assert len(precomputes(driver)) == 1


def test_a_first_chunk_that_comes_again_is_not_computed_a_second_time() -> None:
    driver = Driver()
    driver.begin(generate("r", A, B, A))
    assert [driver.entry(name).owns.keys() for name in precomputes(driver)] == [{key_of(B)}]


def test_a_damaged_chunk_sends_its_request_back_to_the_queue() -> None:
    driver = Driver()
    driver.submit(generate("r", A, B))
    driver.look_up(exact=(0, 1))
    driver.step(result("r", "stalled"))
    driver.do(ev.LoadFailed("r", "flipped bits", 2.0))
    kinds = [type(command) for command in driver.commands]
    assert kinds == [ev.FreeSequence, ev.Release, ev.Lookup]
    assert driver.entry().notes == ["planned again: flipped bits"]


def test_a_request_that_is_planned_again_gives_up_the_chunks_it_computed() -> None:
    driver = Driver()
    driver.begin(generate("r", A), exact=(0,))
    driver.submit(generate("other", A))
    driver.look_up("other", exact=(0,))
    driver.do(ev.LoadFailed("r", "flipped bits", 2.0))
    driver.step(result("r", "cancelled"))
    assert "other" in driver.looked_up_ids()


def test_a_request_that_is_planned_again_has_no_sequence_to_free_meanwhile() -> None:
    driver = Driver()
    driver.submit(generate("r", A))
    driver.look_up(exact=(0, 1))
    driver.step(result("r", "stalled"))
    driver.do(ev.LoadFailed("r", "flipped bits", 2.0))
    driver.cancel()
    assert driver.of(ev.FreeSequence) == []


def test_a_stalled_request_that_is_planned_again_stalls_no_longer() -> None:
    driver = Driver()
    driver.begin(generate("r", A), exact=(0, 1))
    driver.step(result("r", "stalled"))
    driver.do(ev.LoadFailed("r", "flipped bits", 2.0))
    driver.look_up()
    assert len(driver.of(ev.RunStep)) == 1


def test_a_damaged_chunk_within_a_step_is_dealt_with_after_it() -> None:
    driver = Driver()
    driver.begin(generate("r", A, B), exact=(0, 1))
    driver.do(ev.LoadFailed("r", "flipped bits", 2.0))
    assert driver.commands == [ev.FlagCancelled("r")]
    driver.step(result("r", "cancelled"))
    assert driver.looked_up_ids() == ["r"]


def test_news_of_damage_is_ignored_when_nothing_is_loaded() -> None:
    driver = Driver()
    driver.begin(generate("r", A))
    driver.do(ev.LoadFailed("r", "late news", 2.0))
    assert driver.commands == []


def test_after_some_damaged_chunks_nothing_is_reused_any_more() -> None:
    driver = Driver()
    driver.submit(generate("r", A))
    for _ in range(REPLANS_MAX + 1):
        driver.look_up(exact=(0, 1))
        driver.step(result("r", "stalled"))
        driver.do(ev.LoadFailed("r", "flipped bits", 2.0))
    driver.look_up(exact=(0, 1))
    assert driver.of(ev.StartLoading) == [ev.StartLoading("r", ())]


def test_a_request_that_was_planned_before_waits_for_nobody() -> None:
    driver = Driver()
    driver.submit(generate("r", A))
    driver.look_up(exact=(0, 1))
    driver.step(result("r", "stalled"))
    driver.do(ev.LoadFailed("r", "flipped bits", 2.0))
    driver.begin(generate("other", A))
    driver.look_up("r", exact=(0,))
    assert driver.entry("r").phase is Phase.LOADING
    assert driver.of(ev.StartSequence)[0].captures == ()


def test_a_late_answer_to_a_look_up_is_ignored() -> None:
    driver = Driver()
    driver.submit(generate("r", A))
    driver.cancel()
    driver.look_up(exact=(0,))
    assert driver.commands == []


def test_a_slow_disk_holds_up_jobs_that_only_store_but_no_answers() -> None:
    driver = Driver(max_num_seqs=2)
    driver.begin(generate("r", A))
    driver.prefill()
    assert driver.state.writes == 2
    driver.submit(store("s", B), generate("q"))
    assert driver.looked_up_ids() == ["q"]
    driver.stored("r", key_of(A))
    assert driver.looked_up_ids() == []
    driver.cancel("q")
    assert driver.looked_up_ids() == ["s"]


def test_behind_a_very_slow_disk_answers_store_nothing() -> None:
    driver = Driver(max_num_seqs=1)
    driver.begin(generate("r", A, max_tokens=1))
    driver.prefill()
    assert driver.state.writes == 2
    driver.submit(generate("q", C))
    driver.look_up("q", exact=(0,))
    assert driver.of(ev.StartSequence)[0].captures == ()
