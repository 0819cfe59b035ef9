"""Random sequences of everything that can happen to the scheduler's core, in any order, faults included."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from hypothesis.strategies import booleans, integers, randoms, sampled_from
from scheduler_world import SchedulerWorld

from kvblend.actors.core.conditioning import Conditioning, ConditioningKind
from kvblend.actors.core.limits import Limits


class SchedulerMachine(RuleBasedStateMachine):
    """One rule per thing that can happen next; `SchedulerWorld` checks what follows from it."""

    @initialize(
        pages=integers(6, 24),
        seqs=integers(1, 4),
        rows=integers(6, 60),
        minimum=sampled_from((0, 5)),
        kind=sampled_from(("system", "bare", "warm")),
        chance=randoms(use_true_random=False),
    )
    def begin(
        self, pages: int, seqs: int, rows: int, minimum: int, kind: ConditioningKind, chance: random.Random
    ) -> None:
        limits = Limits(pages, 4, seqs, rows, minimum, Conditioning(kind, (200, 201, 202), 4 * pages))
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
            self.world.settle()
            self.world.check_quiet()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=60)
