"""Simulated servers: nothing is lost, nothing is left to chance, and queues are as long as theory has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from simulation.device import DeviceCosts
from simulation.disk import DiskCosts
from simulation.figures import summarize
from simulation.workload import Workload
from simulation.world import Outcome, World

from kvblend.actors.core.limits import Limits
from kvblend.actors.messages import Finished

LAYERS = 4
LIMITS = Limits(pages=4096, max_num_seqs=4, blend_min_tokens=0, num_layers=LAYERS, layer_token_bytes=1000,
                computes_slow_loads=False)  # fmt: skip
DEVICE = DeviceCosts(0.01, 1e-5, 1e-9)
DISK = DiskCosts()
LOAD = Workload(requests=150, rate=2.0, pool=12, chunks=3, chunk_tokens=100, question_tokens=10, max_tokens=4,
                burst=1.0, clients=3)  # fmt: skip


def run(load: Workload = LOAD, device: DeviceCosts = DEVICE, disk: DiskCosts = DISK, stored: bool = True,
        **changes: Any) -> tuple[Outcome, World]:  # fmt: skip
    world = World(dataclasses.replace(LIMITS, **changes), load, device, disk)
    if stored:
        world.store_all()
    return world.run(), world


@pytest.mark.parametrize("stored", [True, False])
def test_every_request_ends_once_and_everything_is_given_back(stored: bool) -> None:
    load = dataclasses.replace(LOAD, rate=20.0, deadline_share=0.5, deadline_s=(0.1, 1.0))
    outcome, world = run(load, stored=stored)
    assert sum(summarize(outcome, "fcfs")["endings"].values()) == load.requests
    assert world.state.idle
    assert world.loader.idle
    assert (world.device.running, world.state.pages_used) == ({}, 0)


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = (summarize(run()[0], "fcfs") for _ in range(2))
    del first["events_per_s"], second["events_per_s"]
    assert first == second


def test_another_seed_gives_others() -> None:
    other = dataclasses.replace(LOAD, seed=1)
    assert summarize(run()[0], "")["first_token_s"] != summarize(run(other)[0], "")["first_token_s"]


@pytest.mark.parametrize("load_share", [0.3, 0.7])
def test_constant_work_waits_as_long_as_theory_says(load_share: float) -> None:
    """M/D/1: Poisson arrivals, one server, constant service S: the mean wait is r S / (2 (1 - r))."""
    service_s = 0.5
    load = Workload(requests=4000, rate=load_share / service_s, mode="full", pool=1, chunks=1, chunk_tokens=20,
                    max_tokens=1, burst=1.0, clients=1)  # fmt: skip
    outcome, _ = run(load, DeviceCosts(service_s, 0.0, 0.0), DiskCosts(lookup_s=0.0), max_num_seqs=1)
    waited = summarize(outcome, "fcfs")["wait_s"]
    assert waited["mean"] == pytest.approx(load_share * service_s / (2 * (1 - load_share)), rel=0.1)


def test_what_is_missing_is_computed_once_and_found_afterwards() -> None:
    outcome, world = run(stored=False)
    assert len(world.store.disk) == LOAD.pool + 1
    assert 0.9 < summarize(outcome, "fcfs")["chunk_hit_ratio"] < 1.0


def test_a_slow_disk_holds_the_first_token_back() -> None:
    one = dataclasses.replace(LOAD, requests=1)
    # three chunks of 100 tokens and the system prompt's 30, 4 layers of 1,000 bytes a token
    num_bytes = 330 * LAYERS * 1000
    slow, _ = run(one, disk=dataclasses.replace(DISK, read_bytes_per_s=1e6))
    first = summarize(slow, "fcfs")["first_token_s"]["mean"]
    assert num_bytes / 1e6 < first < num_bytes / 1e6 + 0.2


def test_memory_that_is_too_small_is_read_into_again() -> None:
    small, _ = run(disk=dataclasses.replace(DISK, host_bytes=800_000))
    large, _ = run()
    assert small.bytes_read > 3 * large.bytes_read


def test_more_at_once_are_answered_sooner() -> None:
    load = dataclasses.replace(LOAD, rate=100.0, max_tokens=32)
    alone, together = (run(load, max_num_seqs=count)[0].simulated_s for count in (1, 4))
    assert together < 0.6 * alone


def test_who_finds_the_queue_full_is_refused() -> None:
    world = World(LIMITS, dataclasses.replace(LOAD, rate=1e4), DEVICE, DISK, queue_max=10)
    world.store_all()
    ends = [one.terminal for one in world.run().ended]
    assert len(ends) == LOAD.requests
    assert sum(end is None for end in ends) > 100
    assert sum(isinstance(end, Finished) for end in ends) >= 10


@pytest.mark.parametrize("overload", [1.0, 4.0])
def test_with_the_earliest_deadline_first_no_fewer_are_met_than_first_come_first_served(overload: float) -> None:
    """Four times as many requests as can be answered: who cannot be in time must not take the place of who can."""
    load = dataclasses.replace(LOAD, requests=600, rate=8.0 * overload, deadline_share=1.0, deadline_s=(0.4, 3.0))
    costs = dataclasses.replace(DEVICE, row_layer_s=1.5e-4)
    outcomes = [run(load, costs, policy=name, itl_ms_max=100.0)[0] for name in ("fcfs", "edf")]
    met = [summarize(outcome, "")["deadlines_met"] for outcome in outcomes]
    assert met[1] >= met[0]
