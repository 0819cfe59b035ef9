"""Who is next: arrival, deadline, fair shares, and how often anybody may be passed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_driver import A, B, Driver, generate, key_of, store
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from kvblend.actors.core import ordering as rules
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.ordering import ArrivalPolicy, DeadlinePolicy, Ordering, PolicyName, policy_of

COST_S = 2.0


def queue(policy: PolicyName = "fcfs", share_slack: float = 0.0) -> Ordering:
    return Ordering(policy_of(policy, lambda job: COST_S, share_slack))


def arrive(order: Ordering, name: str, at_s: float = 0.0, kind: str = "generate", **more: Any) -> Entry:
    job = generate(name, A) if kind == "generate" else store(name, A)
    entry = Entry(replace(job, **more), at_s)
    order.arrive(entry)
    return entry


def admit_all(order: Ordering, waiting: list[Entry], at_s: float = 0.0) -> list[str]:
    names = []
    while waiting:
        entry = order.first(waiting, (), at_s)
        waiting.remove(entry)
        order.admit(entry, waiting, set)
        names.append(entry.request_id)
    return names


def test_a_policy_is_known_by_its_name() -> None:
    assert isinstance(policy_of("fcfs", lambda job: 0.0, 0.0), ArrivalPolicy)
    assert isinstance(policy_of("edf", lambda job: 0.0, 0.0), DeadlinePolicy)


def test_first_come_first_served() -> None:
    order = queue()
    assert admit_all(order, [arrive(order, name) for name in "abc"]) == ["a", "b", "c"]


def test_the_one_that_must_start_first_goes_first() -> None:
    order = queue("edf")
    waiting = [arrive(order, name, deadline_ms=ms) for name, ms in (("a", 9000.0), ("b", 4000.0), ("c", 5000.0))]
    assert admit_all(order, waiting) == ["b", "c", "a"]


def test_without_a_deadline_there_is_one_all_the_same() -> None:
    order = queue("edf")
    old = arrive(order, "old", 0.0)
    new = arrive(order, "new", 25.0, deadline_ms=9000.0)
    assert admit_all(order, [new, old], 25.0) == ["old", "new"]


def test_who_would_be_late_all_the_same_makes_nobody_else_late() -> None:
    order = queue("edf")
    late, fine = arrive(order, "late", deadline_ms=1500.0), arrive(order, "fine", deadline_ms=5000.0)
    assert admit_all(order, [late, fine]) == ["fine", "late"]


def test_of_those_that_will_be_late_the_one_that_is_the_least_so_goes_first() -> None:
    order = queue("edf")
    waiting = [arrive(order, "a", deadline_ms=500.0), arrive(order, "b", deadline_ms=1500.0)]
    assert admit_all(order, waiting) == ["b", "a"]


def test_a_late_one_goes_behind_others_though_its_client_has_had_less() -> None:
    order = queue("edf")
    admit_all(order, [arrive(order, f"a{n}", client="a") for n in range(3)])
    late = arrive(order, "late", client="b", deadline_ms=1500.0)
    order._had["b"] = 0.0
    assert admit_all(order, [late, arrive(order, "fine", client="a", deadline_ms=9000.0)]) == ["fine", "late"]


def test_what_is_learnt_while_a_request_waits_counts() -> None:
    cost_s = [1.0]
    order = Ordering(policy_of("edf", lambda job: cost_s[0], 0.0))
    waiting = [arrive(order, "a", deadline_ms=4000.0), arrive(order, "b", deadline_ms=9000.0)]
    assert order.first(waiting, (), 0.0).request_id == "a"
    cost_s[0] = 5.0
    assert order.first(waiting, (), 0.0).request_id == "b"


def test_a_prompt_that_was_admitted_in_time_is_not_late_for_being_computed() -> None:
    order = queue("edf")
    first, second = arrive(order, "a", deadline_ms=3000.0), arrive(order, "b", deadline_ms=9000.0)
    for entry in (first, second):
        order.admit(entry, (), set)
    assert order.sort_prefills([second, first], 2.0) == [first, second]


def test_clients_take_turns() -> None:
    order = queue()
    many = [arrive(order, f"a{n}", client="a") for n in range(4)]
    few = [arrive(order, f"b{n}", client="b") for n in range(2)]
    assert admit_all(order, many + few) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_client_is_owed_nothing_for_the_time_in_which_it_asked_for_nothing() -> None:
    order = queue()
    admit_all(order, [arrive(order, f"a{n}", client="a") for n in range(9)])
    waiting = [arrive(order, f"{name}{n}", client=name) for n in range(2) for name in "ab"]
    assert admit_all(order, waiting) == ["b0", "a0", "b1", "a1"]


def test_deadlines_come_before_shares_as_long_as_these_are_about_equal() -> None:
    order = queue("edf", share_slack=30.0)
    waiting = [arrive(order, f"a{n}", client="a", deadline_ms=4000.0) for n in range(6)]
    waiting.append(arrive(order, "b", client="b", deadline_ms=9000.0))
    tokens = waiting[0].job.tokens_max
    assert admit_all(order, waiting).index("b") == 1 + int(30 // tokens)


def test_chunks_for_later_come_after_answers() -> None:
    order = queue()
    waiting = [arrive(order, "s", kind="precompute"), arrive(order, "r")]
    assert admit_all(order, waiting) == ["r", "s"]


def test_a_chunk_that_an_answer_waits_for_is_as_urgent_as_an_answer() -> None:
    order = queue()
    chunk = arrive(order, "s", kind="precompute")
    chunk.owns[key_of(A)] = 1
    other = arrive(order, "r")
    assert order.first([other, chunk], {key_of(A)}, 0.0) is chunk


@pytest.mark.parametrize(
    ("kind", "limit"), [("generate", rules.OVERTAKEN_MAX), ("precompute", rules.OVERTAKEN_PRECOMPUTE_MAX)]
)
def test_nobody_is_passed_for_ever(kind: str, limit: int) -> None:
    order = queue("edf", 1e9)
    last = arrive(order, "last", kind=kind, deadline_ms=1e9)
    passed = 0
    while True:
        waiting = [last, arrive(order, f"r{passed}", deadline_ms=5000.0)]
        entry = order.first(waiting, (), 0.0)
        waiting.remove(entry)
        order.admit(entry, waiting, set)
        if entry is last:
            break
        passed += 1
    assert passed == limit


def test_who_was_passed_too_often_goes_by_arrival() -> None:
    order = queue("edf")
    old, older = arrive(order, "old", deadline_ms=5000.0), arrive(order, "older", deadline_ms=9000.0)
    old.overtaken = older.overtaken = rules.OVERTAKEN_MAX
    old.arrival, older.arrival = older.arrival, old.arrival
    assert admit_all(order, [old, older]) == ["older", "old"]


def test_a_step_takes_answers_first_and_what_was_passed_by_before_them() -> None:
    order = queue()
    chunk, first, second = arrive(order, "s", kind="precompute"), arrive(order, "a"), arrive(order, "b")
    for entry in (chunk, second, first):
        order.admit(entry, (), set)
    assert order.sort_prefills([chunk, first, second], 0.0) == [second, first, chunk]
    chunk.skipped = rules.SKIPPED_MAX
    assert order.sort_prefills([chunk, first, second], 0.0)[0] is chunk


def test_those_ahead_are_told_without_anybody_arriving() -> None:
    order = queue("edf")
    waiting = [arrive(order, name, deadline_ms=ms) for name, ms in (("a", 4000.0), ("b", 9000.0))]
    new = Entry(replace(generate("new", A), deadline_ms=6000.0), 0.0)
    assert [entry.request_id for entry in order.ahead_of(new, waiting, 0.0)] == ["a"]
    assert arrive(order, "next").arrival == 3


def test_clients_that_have_gone_are_forgotten() -> None:
    order = queue()
    for n in range(rules.CLIENTS_MAX + 50):
        order.admit(arrive(order, f"r{n}", client=f"c{n}"), (), lambda: {"c7"})
    assert len(order._had) <= rules.CLIENTS_MAX


@given(
    policy=sampled_from(("fcfs", "edf")),
    jobs=lists(
        tuples(integers(0, 2), integers(1, 60), sampled_from(("generate", "precompute"))), min_size=2, max_size=90
    ),
    at_once=integers(1, 4),
)
def test_everybody_is_admitted_after_those_before_it_and_a_bounded_number_of_others(
    policy: PolicyName, jobs: list[tuple[int, int, str]], at_once: int
) -> None:
    """`at_once` arrive between two admissions: the queue grows all the time, until nobody comes any more."""
    order, waiting, before, left = queue(policy, 50.0), list[Entry](), dict[str, int](), list(jobs)
    admitted = 0
    while left or waiting:
        for client, seconds, kind in left[:at_once]:
            name = f"r{len(before)}"
            before[name] = admitted + len(waiting)
            waiting.append(arrive(order, name, kind=kind, client=str(client), deadline_ms=1e3 * seconds))
        del left[:at_once]
        entry = order.first(waiting, (), 0.0)
        waiting.remove(entry)
        order.admit(entry, waiting, set)
        assert admitted - before[entry.request_id] <= rules.OVERTAKEN_MAX
        admitted += 1


def test_the_core_shares_between_clients() -> None:
    driver = Driver(max_num_seqs=1)
    many = [replace(generate(f"a{n}", B), client="a") for n in range(3)]
    driver.submit(*many, replace(generate("b0"), client="b"))
    driver.cancel("a0")
    assert driver.looked_up_ids() == ["b0"]
