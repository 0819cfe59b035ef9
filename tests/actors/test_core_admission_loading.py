"""How jobs get in, where loading is concerned: looking ahead, deadlines, and what the controller decides."""

from __future__ import annotations

from dataclasses import replace

from core_driver import A, B, Driver, generate

from kvblend.actors.core import events as ev
from kvblend.actors.core.speeds import TierSpeed
from kvblend.actors.messages import Planned


def test_requests_that_wait_for_room_are_looked_ahead_once_each_as_many_as_may() -> None:
    driver = Driver(pages=4, lookahead_requests_max=2)
    driver.submit(generate("running", A))
    driver.submit(generate("a", A))
    ahead = [command.job.request_id for command in driver.of(ev.LookAhead)]
    driver.submit(generate("b", A))
    ahead += [command.job.request_id for command in driver.of(ev.LookAhead)]
    driver.submit(generate("c", A))
    ahead += [command.job.request_id for command in driver.of(ev.LookAhead)]
    assert ahead == ["a", "b"]


def test_looking_ahead_can_be_off() -> None:
    driver = Driver(pages=4, lookahead_requests_max=0)
    driver.submit(generate("running", A), generate("a", A))
    assert driver.of(ev.LookAhead) == []


def test_a_request_that_was_looked_ahead_is_looked_up_when_there_is_room() -> None:
    driver = Driver(pages=4)
    driver.submit(generate("running", A), generate("a", A))
    driver.cancel("running")
    assert driver.looked_up_ids() == ["a"]
    assert not driver.state.admission.ahead


def test_a_request_that_leaves_the_queue_has_its_leases_released() -> None:
    driver = Driver(pages=4)
    driver.submit(generate("running", A), generate("a", A))
    driver.cancel("a")
    assert ev.Release("a") in driver.commands


def test_requests_are_looked_ahead_again_by_a_new_loader() -> None:
    driver = Driver(pages=4)
    driver.begin(generate("running", A))
    driver.submit(generate("a", A))
    driver.crash("loader")
    assert [command.job.request_id for command in driver.of(ev.LookAhead)] == ["a"]


def test_a_look_up_says_until_when_its_request_must_have_ended() -> None:
    driver = Driver()
    driver.do(ev.Submitted(replace(generate("r", A), deadline_ms=1500.0), 2.0))
    assert [command.deadline_s for command in driver.of(ev.Lookup)] == [3.5]


def controlled(row_s: float = 0.01) -> Driver:
    """A driver that knows how fast it computes."""
    driver = Driver(num_layers=3)
    driver.state.controller.compute.note(100.0, 100 * row_s, blend=True)
    return driver


def look_up_slow(driver: Driver, bytes_per_s: float) -> None:
    hits = (ev.Hit(0, True, "disk", 10), ev.Hit(1, True, "disk", 10), ev.Hit(2, False, "disk", 1_000_000))
    driver.do(ev.LookedUp("r", hits, 1.0, {"disk": TierSpeed(bytes_per_s, 0.0, 1.0)}))


def test_a_chunk_that_loads_slower_than_it_computes_is_computed_and_neither_loaded_nor_stored_again() -> None:
    driver = controlled()
    driver.submit(generate("r", A, B))
    look_up_slow(driver, 1e5)
    (load,) = driver.of(ev.StartLoading)
    (start,) = driver.of(ev.StartSequence)
    assert (load.segments, start.captures) == ((0, 1), ())
    assert list(driver.state.entries) == ["r"]
    planned = driver.emitted()[0]
    assert isinstance(planned, Planned)
    assert planned.usage.loading.chunks_computed == 1
    assert "1 stored segments were computed" in planned.usage.notes[-1]


def test_a_ratio_that_loading_hides_is_the_plans() -> None:
    driver = controlled(row_s=0.001)
    shape = ev.BlendShape(full_layers=0, auto_ratio=True)
    driver.submit(replace(generate("r", A, B, ratio=0.2), shape=shape))
    look_up_slow(driver, 1e8)
    (start,) = driver.of(ev.StartSequence)
    assert start.plan.recompute_ratio > 0.2
