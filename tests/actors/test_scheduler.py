"""The scheduler's shell: commands go where they belong, crashes of others are heard of, nobody waits in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from core_driver import A, Driver, generate, key_of
from shell_rig import Rig, open_rig

from kvblend.actors.core import events as ev
from kvblend.actors.messages import Delta, Failed, Finished, Planned, StreamEvent
from kvblend.actors.runtime.actor import ActorDied
from kvblend.actors.scheduler import Scheduler
from kvblend.actors.signals import Reset, SchedulerMessage, WhenIdle


@dataclass
class World:
    """`rig.mail` stands for the blender's mailbox, `rig.passed_on` for the loader's."""

    rig: Rig
    driver: Driver
    events: list[StreamEvent] = field(default_factory=list)

    def tell(self, *messages: SchedulerMessage) -> None:
        self.rig.tell(*messages)

    async def begin(self, name: str = "r") -> None:
        """Submit a request without chunks and bring it to its first step."""
        self.tell(ev.Submitted(generate(name, mode="full"), 0.0))
        assert isinstance(await self.rig.passed(), ev.Lookup)
        self.tell(ev.LookedUp(name, (), 1.0))
        assert await self.rig.passed() == ev.StartLoading(name, ())
        assert isinstance(await self.rig.heard(), ev.StartSequence)
        assert isinstance(await self.rig.heard(), ev.RunStep)

    async def until_idle(self, deadline_s: float = 10.0) -> bool:
        assert self.rig.ref is not None
        return await self.rig.ref.ask(WhenIdle, deadline_s)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with open_rig() as rig:
        w = World(rig, Driver())

        def make() -> Scheduler:
            w.driver = Driver()
            return Scheduler(w.driver.state, lambda: rig.peer, lambda: rig.scheduler, w.events.append, check=True)

        rig.run(make)
        assert isinstance(await rig.heard(), Reset)
        assert isinstance(await rig.passed(), Reset)
        yield w


async def test_commands_go_to_the_actor_that_performs_them() -> None:
    async with world() as w:
        await w.begin()
        assert isinstance(w.events[0], Planned)


async def test_events_of_the_request_are_emitted_in_order() -> None:
    async with world() as w:
        await w.begin()
        sampled = ev.ItemResult("r", "sampled", 1, ev.Sampled(1, "hi", True), ev.PrefillReport(0, 0, 5, 1.0, 0.0))
        w.tell(ev.StepDone(w.driver.state.step_number, (sampled,), 1.0, 2.0))
        assert await w.until_idle()
        assert [type(event) for event in w.events] == [Planned, Delta, Finished]


async def test_idle_is_answered_when_the_last_job_has_ended() -> None:
    async with world() as w:
        await w.begin()
        asking = asyncio.create_task(w.until_idle())
        await w.rig.until(lambda: len(w.rig.actor._waiting) == 1)  # type: ignore[union-attr]
        assert not asking.done()
        w.tell(ev.CancelRequested("r", "enough", 2.0))
        assert await w.rig.heard() == ev.FlagCancelled("r")
        w.tell(ev.StepDone(w.driver.state.step_number, (ev.ItemResult("r", "cancelled"),), 1.0, 3.0))
        assert await asking


async def test_a_dead_blender_fails_the_request_that_was_sent_to_it() -> None:
    async with world() as w:
        w.rig.mail.close()
        w.tell(ev.Submitted(generate("r", A), 0.0), ev.LookedUp("r", (), 1.0))
        assert await w.until_idle()
        end = w.events[-1]
        assert isinstance(end, Failed)
        assert end.message == "the blender failed and was restarted"


async def test_a_dead_loader_fails_the_request_that_was_sent_to_it() -> None:
    async with world() as w:
        w.rig.passed_on.close()
        w.tell(ev.Submitted(generate("r", A), 0.0))
        assert await w.until_idle()
        assert [type(event) for event in w.events] == [Failed]


async def test_what_cannot_be_freed_at_a_dead_actor_fails_nobody_else() -> None:
    async with world() as w:
        await w.begin("a")
        w.rig.mail.close()
        w.tell(ev.CancelRequested("a", "enough", 2.0))
        await w.rig.until(lambda: w.driver.state.entries["a"].ending is not None)
        w.rig.mail.reopen()
        w.tell(ev.Submitted(generate("b"), 3.0))
        await w.rig.until(lambda: "b" in w.driver.state.entries)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(isinstance(event, Failed) for event in w.events)


async def test_after_a_crash_the_others_are_reset_behind_the_last_commands() -> None:
    async with world() as w:
        await w.begin()
        w.tell(ev.LookedUp("r", (), 2.0), ev.Submitted(generate("late"), 2.0), "nonsense")  # type: ignore[arg-type]
        await w.rig.crashes.get()
        assert isinstance(await w.rig.passed(), ev.Lookup)
        assert isinstance(await w.rig.passed(), Reset)
        assert isinstance(await w.rig.heard(), Reset)
        assert w.driver.state.idle


async def test_who_waits_for_idle_hears_of_a_crash() -> None:
    async with world() as w:
        await w.begin()
        asking = asyncio.create_task(w.until_idle())
        await w.rig.until(lambda: len(w.rig.actor._waiting) == 1)  # type: ignore[union-attr]
        w.tell("nonsense")  # type: ignore[arg-type]
        with pytest.raises(ActorDied):
            await asking


async def test_a_broken_state_is_a_crash_when_checking() -> None:
    async with world() as w:
        await w.begin()
        w.driver.state.pages_used += 1
        w.tell(ev.Unstalled("r", 2.0))
        assert "pages counted" in str(await w.rig.crashes.get())


async def test_old_news_after_a_crash_is_ignored() -> None:
    async with world() as w:
        await w.begin()
        number = w.driver.state.step_number
        w.tell("nonsense")  # type: ignore[arg-type]
        await w.rig.crashes.get()
        w.tell(
            ev.StepDone(number, (ev.ItemResult("r", "running"),), 1.0, 3.0),
            ev.Stored("r", key_of(A), True, "", 3.0),
            ev.LookedUp("r", (), 3.0),
            ev.FirstLayerLoaded("r", 3.0),
        )
        assert await w.until_idle()
        assert w.rig.crashes.empty()
