"""What jobs take, and how long a new one would wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_driver import REPORT, A, B, Driver, generate, result, store

from kvblend.actors.core import events as ev
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.forecast import Forecast
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.messages import Failed, Finished

JOB = generate("r", A, mode="full")
TOKENS = JOB.layout.num_tokens


def done(device_ms: float, job: ev.Job = JOB) -> Entry:
    entry = Entry(job, 0.0)
    entry.device_ms = device_ms
    return entry


def taught(seqs: int = 2) -> Forecast:
    """A prompt of JOB's length takes a second, an answer half of one."""
    forecast = Forecast(seqs)
    forecast.note_prompt(done(1000.0))
    forecast.note_answer(500.0, 4)
    return forecast


def test_nothing_is_foretold_of_what_is_not_known() -> None:
    forecast = Forecast(2)
    assert (forecast.prompt_s(JOB), forecast.first_token_s(JOB, (), ())) == (None, None)
    assert taught().first_token_s(generate("r", A, mode="blend"), (), ()) is None


def test_a_prompt_takes_what_its_tokens_take() -> None:
    assert taught().prompt_s(JOB) == pytest.approx(1.0)


def test_alone_it_takes_the_longer_one_of_loading_and_computing() -> None:
    forecast = taught()
    blend = generate("r", A, mode="prefix")
    forecast.note_prompt(done(500.0, blend))
    forecast.note_load(blend, 3.0)
    assert forecast.alone_s(blend) == pytest.approx(3.0)
    assert forecast.alone_s(JOB) == pytest.approx(1.0), "nothing is loaded for a full prefill"


def test_prompts_go_before_it_and_answers_where_a_place_must_get_free() -> None:
    forecast, running, waiting = taught(), [done(250.0), done(0.0)], [done(0.0), done(0.0)]
    assert forecast.first_token_s(JOB, running[:1], ()) == pytest.approx(0.75 + 1.0)
    assert forecast.first_token_s(JOB, running, waiting) == pytest.approx(1.75 + 2.0 + 3 * 0.5 + 1.0)


def test_a_prompt_that_takes_longer_than_expected_takes_nothing_off() -> None:
    assert taught().first_token_s(JOB, [done(9000.0)], ()) == pytest.approx(1.0)


def taught_driver() -> Driver:
    """The core has seen one prompt of nine tokens, which took a second."""
    driver = Driver(max_num_seqs=1)
    driver.begin(replace(JOB, request_id="before", sampling=replace(JOB.sampling, max_tokens=1)))
    done = result("before", "sampled", prefill=REPORT)
    driver.do(ev.StepDone(driver.state.step_number, (done,), 1000.0, 3.0))
    return driver


def test_a_request_that_would_be_late_is_refused_and_holds_nothing() -> None:
    driver = taught_driver()
    driver.submit(replace(JOB, request_id="running"))
    driver.submit(replace(JOB, deadline_ms=700.0))
    end = driver.terminal()
    assert isinstance(end, Failed)
    assert end.code == "overloaded"
    assert end.message == "deadline_ms is 700; the first token is expected in 2000 ms, behind 0 waiting requests"
    assert list(driver.state.entries) == ["running"]


def answered_driver() -> Driver:
    """As `taught_driver`; an answer has ended since then, four tokens, two seconds each behind the first."""
    driver = taught_driver()
    driver.begin(replace(JOB, request_id="answered"))
    for prefill in (REPORT, None, None, None):
        item = result("answered", "sampled", prefill=prefill)
        driver.do(ev.StepDone(driver.state.step_number, (item,), 1000.0 if prefill else 2000.0, 9.0))
    assert isinstance(driver.terminal(), Finished)
    return driver


def test_a_deadline_is_one_for_the_whole_answer() -> None:
    driver = answered_driver()
    refuse, tokens = driver.state.admission.refusal, 0.8 * 1 + 0.2 * 4
    driver.submit(replace(JOB, request_id="running"))
    job = replace(JOB, deadline_ms=3000.0)
    first_s = driver.state.forecast.first_token_s(job, driver.state.running(), ())
    assert first_s is not None
    end_s = first_s + (tokens - 1) * 2.0
    assert 0.75 * first_s < 3.0 < 0.75 * end_s, "the first token comes in time, the last one does not"
    refusal = refuse(job, 9.0)
    assert refusal is not None
    said = f"the last token is expected in {1e3 * end_s:.0f} ms, behind 0 waiting requests"
    assert refusal.message == f"deadline_ms is 3000; {said}"
    assert refusal.retry_after_s == pytest.approx(end_s - 3.0)
    one = replace(job, sampling=replace(job.sampling, max_tokens=1))
    assert refuse(one, 9.0) is None, "no longer than it may be"


def test_a_prompt_beside_answers_does_not_count_for_every_token_of_the_next_one() -> None:
    driver = answered_driver()
    driver.submit(replace(JOB, request_id="running"))
    before = driver.state.admission.refusal(replace(JOB, deadline_ms=3000.0), 9.0)
    # steps that took long for what was in them beside decoding
    for _ in range(20):
        driver.state.forecast.note_step(60.0)
    assert driver.state.admission.refusal(replace(JOB, deadline_ms=3000.0), 9.0) == before


def test_no_answer_is_foretold_before_one_has_ended() -> None:
    forecast = Forecast(2)
    forecast.note_prompt(done(1000.0))
    forecast.note_step(0.5)
    assert forecast.going_on_s(JOB, 0.5) == 0.0
    forecast.note_answer(100.0, 3)
    assert forecast.going_on_s(JOB, 0.5) == pytest.approx(2 * 0.5)


def test_an_idle_server_refuses_nobody_and_so_learns_better() -> None:
    driver = taught_driver()
    driver.submit(replace(JOB, deadline_ms=1.0))
    assert driver.looked_up_ids() == ["r"]


def test_answers_that_run_are_nearer_their_end_than_those_that_have_not_begun() -> None:
    forecast, running = taught(), done(0.0)
    running.phase, running.prefill, running.decode_ms = Phase.DECODING, REPORT, 400.0
    begun = forecast.first_token_s(JOB, [running, running], ())
    running.decode_ms = 0.0
    fresh = forecast.first_token_s(JOB, [running, running], ())
    assert begun is not None
    assert fresh is not None
    assert begun == pytest.approx(fresh - 0.4)


def test_one_that_might_just_be_in_time_is_taken() -> None:
    driver = taught_driver()
    driver.submit(replace(JOB, deadline_ms=800.0))
    assert driver.looked_up_ids() == ["r"]


def test_the_queue_counts() -> None:
    driver = taught_driver()
    driver.submit(*(replace(JOB, request_id=f"q{n}") for n in range(4)))
    refusal = driver.state.admission.refusal(replace(JOB, deadline_ms=3000.0), 0.0)
    assert refusal is not None
    assert "behind 3 waiting requests" in refusal.message
    assert refusal.retry_after_s == pytest.approx(5.0 - 3.0)


def test_only_answers_with_a_deadline_are_ever_refused() -> None:
    driver = taught_driver()
    assert driver.state.admission.refusal(JOB, 0.0) is None
    assert driver.state.admission.refusal(replace(store("s", B), deadline_ms=0.1), 0.0) is None


@pytest.mark.parametrize("first", [True, False])
def test_tiny_prompts_do_not_change_what_a_large_one_is_thought_to_take(first: bool) -> None:
    forecast, large = Forecast(2), generate("r", tuple(range(10, 1010)), mode="full")
    for is_large in (first, not first):
        if is_large:
            forecast.note_prompt(done(1000.0, large))
            continue
        for _ in range(50):
            forecast.note_prompt(done(60.0))
    assert forecast.prompt_s(large) == pytest.approx(1.0)


def served(admitted_s: float = 1.0, first_token_s: float = 3.0, job: ev.Job = JOB) -> Entry:
    entry = Entry(job, 0.0)
    entry.admitted_s, entry.first_token_s = admitted_s, first_token_s
    return entry


def test_a_request_is_served_until_its_last_token_beside_all_others() -> None:
    forecast = taught()
    forecast.note_begun(served())
    forecast.note_step(0.5)
    assert forecast.served_s(JOB) == pytest.approx(2.0 + 3 * 0.5)


def test_an_answer_is_taken_to_be_as_long_as_others_were() -> None:
    forecast = taught()
    forecast.note_step(0.5)
    long = replace(JOB, sampling=replace(JOB.sampling, max_tokens=1000))
    assert forecast.served_s(long) == pytest.approx(1.0 + 3 * 0.5)


def test_nobody_is_thought_to_take_time_before_anything_is_known() -> None:
    assert Forecast(2).served_s(JOB) == 0.0


def test_the_core_learns_how_long_requests_are_served() -> None:
    driver = taught_driver()
    driver.begin(JOB)
    driver.do(ev.StepDone(driver.state.step_number, (result("r", "sampled", prefill=REPORT),), 500.0, 9.0))
    driver.do(ev.StepDone(driver.state.step_number, (result("r", "sampled"),), 250.0, 9.5))
    driver.do(ev.StepDone(driver.state.step_number, (result("r", "sampled"),), 250.0, 9.7))
    # admitted at 0, begun at 9 where the one before had begun at 3; one token is the length that is known
    begun_s = 0.8 * 3.0 + 0.2 * 9.0
    assert driver.state.forecast.served_s(JOB) == pytest.approx(begun_s)
    driver.do(ev.StepDone(driver.state.step_number, (result("r", "sampled"),), 250.0, 9.9))
    tokens = 0.8 * 1 + 0.2 * 4
    assert driver.state.forecast.served_s(JOB) == pytest.approx(begun_s + (tokens - 1) * 0.25)
