"""The state as a whole: idle or not, its own checks, its stories."""

from __future__ import annotations

import pytest
from core_driver import A, Driver, generate, key_of, result

from kvblend.actors.core.scheduler import InvariantBroken


def test_a_new_state_is_idle() -> None:
    assert Driver().state.idle


def test_a_state_with_work_is_not_idle() -> None:
    driver = Driver()
    driver.submit(generate())
    assert not driver.state.idle


def test_a_state_that_still_writes_is_not_idle() -> None:
    driver = Driver()
    driver.begin(generate("r", A, max_tokens=1), exact=(0,))
    driver.prefill()
    assert driver.state.entries == {}
    assert not driver.state.idle
    assert driver.state.writes == 1
    driver.stored("r", key_of(A))
    assert driver.state.idle


def broken(driver: Driver) -> str:
    with pytest.raises(InvariantBroken) as caught:
        driver.state.validate()
    return str(caught.value)


def test_validate_finds_lost_pages() -> None:
    driver = Driver()
    driver.submit(generate())
    driver.state.pages_used = 0
    assert "0 pages counted, 3 held" in broken(driver)


def test_validate_finds_a_wait_for_nobody() -> None:
    driver = Driver(max_num_seqs=1)
    driver.submit(generate("a"), generate("b"))
    driver.entry("b").waits.add(key_of(A))
    assert "b waits for a key nobody computes" in broken(driver)


def test_validate_finds_a_job_that_waits_for_who_is_gone() -> None:
    driver = Driver()
    driver.submit(generate())
    driver.entry().waits_for = "nobody"
    assert "r waits for nobody, which is gone" in broken(driver)


def test_validate_finds_a_key_that_is_owned_and_not_in_flight() -> None:
    driver = Driver()
    driver.begin(generate("r", A))
    driver.state.inflight.clear()
    assert "r owns a key that is not in flight for it" in broken(driver)


def test_validate_finds_who_disagrees_about_the_step() -> None:
    driver = Driver()
    driver.begin(generate())
    driver.entry().in_step = False
    assert "r disagrees about being in the step" in broken(driver)


def test_a_story_tells_what_happened_to_one_request() -> None:
    driver = Driver()
    driver.begin(generate("r", A))
    driver.step(result("r", "running"))
    lines = driver.state.story("r").splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "Submitted generate of 9 tokens", "LookedUp", "StepDone running",
    ]  # fmt: skip


def test_a_story_can_be_asked_for_by_the_id_of_the_request() -> None:
    driver = Driver()
    driver.submit(generate("r#1", A), generate("r#2"))
    assert driver.state.story("r") == driver.state.story("r#2")


def test_nothing_is_known_of_strangers() -> None:
    assert Driver().state.story("x") == "nothing is known of x"


def test_stories_do_not_grow_without_end() -> None:
    driver = Driver()
    for number in range(1000):
        driver.submit(generate(f"r{number}"))
        driver.cancel(f"r{number}")
    assert len(driver.state._stories) <= 4 * 64 + 1
