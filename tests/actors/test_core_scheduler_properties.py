"""Random sequences of everything that can happen to the scheduler's core, in any order, faults included."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from hypothesis.strategies import booleans, fixed_dictionaries, integers, just, randoms, sampled_from
from model_actors import LAYERS
from scheduler_world import SchedulerWorld

from kvblend.actors.core import ordering
from kvblend.actors.core.conditioning import Conditioning, ConditioningKind
from kvblend.actors.core.limits import Limits
from kvblend.actors.messages import Failed, Finished

PATIENCE = ("OVERTAKEN_MAX", "OVERTAKEN_PRECOMPUTE_MAX", "SKIPPED_MAX")


class SchedulerMachine(RuleBasedStateMachine):
    """One rule per thing that can happen next; `SchedulerWorld` checks what follows from it."""

    @initialize(
        pages=integers(6, 24),
        seqs=integers(1, 4),
        rows=integers(6, 60),
        minimum=sampled_from((0, 5)),
        kind=sampled_from(("system", "bare", "warm")),
        chance=randoms(use_true_random=False),
        rules=fixed_dictionaries(
            {
                "policy": sampled_from(("fcfs", "edf")),
                "itl_ms_max": sampled_from((None, 5.0, 50.0)),
                "ratio_lever_floor": sampled_from((None, 0.1)),
                "num_layers": just(LAYERS),
                "lookahead_requests_max": sampled_from((0, 2)),
            }
        ),
    )
    def begin(
        self,
        pages: int,
        seqs: int,
        rows: int,
        minimum: int,
        kind: ConditioningKind,
        chance: random.Random,
        rules: dict[str, Any],
    ) -> None:
        # few are there to pass anybody
        self.patches = [patch.object(ordering, name, 3) for name in PATIENCE]
        for one in self.patches:
            one.start()
        limits = Limits(pages, 4, seqs, rows, minimum, Conditioning(kind, (200, 201, 202), 4 * pages), **rules)
        self.world = SchedulerWorld(limits, chance)

    @rule()
    def submit(self) -> None:
        self.world.submit()

    @rule(deadline=booleans())
    def cancel(self, deadline: bool) -> None:
        self.world.cancel(deadline)

    @rule(count=integers(1, 12))
    def go_on(self, count: int) -> None:
        """Most of the time things just go on: else no request would come far."""
        self.world.go_on(count)

    @rule()
    def damage(self) -> None:
        self.world.loader.damage()

    @rule()
    def fill_disk(self) -> None:
        self.world.loader.write("no space left on device")

    @rule()
    def fail_step(self) -> None:
        self.world.blender.step(failing=True)

    @rule(name=sampled_from(("loader", "blender")))
    def crash(self, name: str) -> None:
        self.world.crash(name)

    @rule()
    def revive(self) -> None:
        self.world.revive()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.settle()
                self.world.check_quiet()
            finally:
                for one in self.patches:
                    one.stop()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=60)


def test_a_thousand_requests_at_once_with_every_kind_of_fault_end_with_everything_returned() -> None:
    chance = random.Random(4)
    limits = Limits(300, 4, 16, 200, 5, num_layers=LAYERS, policy="edf", itl_ms_max=20.0, ratio_lever_floor=0.1)
    world = SchedulerWorld(limits, chance, check_every=200)
    for _ in range(950):
        world.submit()
    faults = (
        lambda: world.cancel(False),
        lambda: world.cancel(True),
        world.loader.damage,
        lambda: world.loader.write("no space left on device"),
        lambda: world.blender.step(failing=True),
        lambda: world.crash(chance.choice(("loader", "blender"))),
    )
    while world.state.entries and world.events < 60_000:
        world.revive()
        if len(world.jobs) < 1000:
            world.submit()
        world.go_on(60)
        chance.choices(faults, (6, 2, 2, 1, 2, 0.3))[0]()
    world.settle(moves_max=200_000)
    world.check_quiet()
    answered = [end for end in world.terminals.values() if isinstance(end, Finished) and end.reason != "cancelled"]
    failed = [end for end in world.terminals.values() if isinstance(end, Failed)]
    assert min(len(answered), len(failed)) > 50, "all kinds of ends are among them"
    assert {end.code for end in failed} == {"internal", "deadline_exceeded", "overloaded"}
