"""Requests whose first layer is still loading: what a step does with them."""

from __future__ import annotations

from dataclasses import replace

from core_driver import REPORT, A, B, Driver, generate, result, store

from kvblend.actors.core import events as ev
from kvblend.actors.core.lifecycle import Phase


def items(driver: Driver) -> list[tuple[str, int]]:
    (step,) = driver.of(ev.RunStep)
    return [(item.request_id, item.rows_max) for item in step.items]


def test_a_request_begins_while_its_first_layer_is_loading() -> None:
    driver = Driver()
    driver.submit(generate("a", A))
    driver.look_up("a", exact=(0, 1))
    assert items(driver) == [("a", 9)]
    assert driver.entry("a").phase is Phase.LOADING


def test_a_step_that_went_behind_the_first_layer_ends_the_loading() -> None:
    driver = Driver()
    driver.submit(generate("a", A))
    driver.look_up("a", exact=(0, 1))
    driver.step(result("a", "running"))
    assert driver.entry("a").phase is Phase.PREFILLING


def test_a_request_whose_first_layer_is_loading_leaves_the_room_to_others() -> None:
    driver = Driver(max_num_batched_tokens=9)
    driver.begin(generate("a", mode="full"))
    driver.submit(generate("loads", A))
    driver.look_up("loads", exact=(0, 1))
    driver.begin(generate("b", B, mode="full"))
    driver.step(result("a", "sampled", prefill=REPORT))
    assert items(driver) == [("a", 1), ("b", 8)]


def test_a_lone_request_is_not_cut_because_it_loads() -> None:
    driver = Driver(pages=10**6, max_num_batched_tokens=4096, itl_ms_max=100.0)
    for long in ("first", "second"):
        driver.submit(generate(long, tuple(range(1000)), max_tokens=1))
        driver.look_up(long, exact=(0,))
        assert items(driver) == [(long, 1005)]
        done = replace(result(long, "sampled", prefill=REPORT), rows=1002, row_layers=30 * 1002)
        driver.do(ev.StepDone(driver.state.step_number, (done,), 30_000.0, 3.0))
        for key in [command.key for command in driver.of(ev.StoreSegment)]:
            driver.stored(long, key)


def test_one_loading_request_at_a_time_is_projected() -> None:
    driver = Driver()
    driver.submit(generate("a", A), generate("b", B))
    driver.look_up("a", exact=(0, 1))
    driver.look_up("b", exact=(0, 1))
    assert driver.state.step == ("a",)
    driver.step(result("a", "stalled"))
    assert items(driver) == [("b", 10)]


def test_a_chunk_for_later_goes_on_while_an_answer_loads() -> None:
    driver = Driver(max_num_batched_tokens=9)
    driver.submit(store("s", A))
    driver.look_up("s")
    driver.submit(generate("loads", B))
    driver.look_up("loads", exact=(0, 1))
    driver.step(result("s", "running"))
    assert items(driver)[0][0] == "s"
