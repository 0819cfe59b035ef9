"""Supervision: crashes, restarts and their limit, statistics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from actor_world import Message, World, ask_count, open_world, started

from kvblend.actors.runtime.actor import Actor, ActorDied
from kvblend.actors.runtime.supervisor import RestartLimitExceeded, Supervisor


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as world:
        yield world


async def test_messages_sent_before_the_start_are_handled(world: World) -> None:
    ref = world.spawn()
    ref.tell_nowait("one")
    assert await ask_count(ref) == 1


async def test_a_crashed_actor_is_replaced_by_a_fresh_one(world: World) -> None:
    ref = await started(world)
    ref.tell_nowait("one")
    await world.crash(ref)
    assert await ask_count(ref) == 0
    assert len(world.made) == 2


async def test_the_hook_gets_the_interrupted_and_the_waiting_messages(world: World) -> None:
    ref = await started(world)
    for message in ("fail", "one", "two"):
        ref.tell_nowait(message)
    await world.started.get()
    assert world.crashes == [("worker", "broken", ("fail", "one", "two"))]


async def test_a_crash_is_logged_with_its_traceback(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ref = await started(world)
    with caplog.at_level(logging.ERROR, "kvblend.actors.runtime.supervisor"):
        await world.crash(ref)
    assert "actor worker crashed" in caplog.text
    assert "ArithmeticError: broken" in caplog.text


async def test_a_crashed_instance_is_stopped(world: World) -> None:
    await world.crash(await started(world))
    assert world.stopped == ["worker"]


async def test_three_restarts_in_a_minute_are_survived(world: World) -> None:
    ref = await started(world)
    for _ in range(3):
        await world.crash(ref)
    assert await ask_count(ref) == 0
    assert not world.supervisor.fatal.done()


async def test_the_fourth_crash_in_a_minute_ends_everything(world: World) -> None:
    other = world.spawn("other")
    await world.started.get()
    ref = await started(world)
    for _ in range(3):
        await world.crash(ref)
    ref.tell_nowait("fail")
    error = await world.supervisor.fatal
    assert isinstance(error, RestartLimitExceeded)
    assert isinstance(error.__cause__, ArithmeticError)
    await world.supervisor.close()
    assert (ref.alive, other.alive) == (False, False)


async def test_crashes_far_apart_never_end_everything(world: World) -> None:
    ref = await started(world)
    for _ in range(8):
        await world.crash(ref)
        world.now += 20.0
    assert await ask_count(ref) == 0


async def test_the_limit_is_each_actors_own(world: World) -> None:
    refs = [world.spawn(name) for name in ("a", "b")]
    for _ in refs:
        await world.started.get()
    for ref in refs * 3:
        await world.crash(ref)
    assert [await ask_count(ref) for ref in refs] == [0, 0]


async def test_an_actor_that_cannot_start_ends_everything(world: World) -> None:
    world.start_fails = True
    world.spawn()
    assert "worker crashed after 3 restarts in 60 s" in str(await world.supervisor.fatal)
    assert len(world.made) == 4


async def test_a_factory_that_fails_is_a_crash(world: World) -> None:
    def factory() -> Actor[Message]:
        raise OSError("no device")

    world.supervisor.spawn(factory, 1, "worker")
    await world.supervisor.fatal
    assert {error for _, error, _ in world.crashes} == {"no device"}


async def test_a_failing_hook_ends_everything(world: World) -> None:
    world.hook_fails = True
    ref = await started(world)
    ref.tell_nowait("fail")
    assert isinstance(await world.supervisor.fatal, LookupError)
    await world.supervisor.close()
    assert not ref.alive


async def test_a_stop_that_hangs_is_cut_short(world: World) -> None:
    world.stop_hangs = True
    await world.crash(await started(world))
    assert world.stopped == ["worker"]


async def test_a_stop_that_fails_is_reported(world: World) -> None:
    world.stop_fails = True
    await started(world)
    await world.supervisor.close()
    assert world.crashes == [("worker", "cannot stop", ())]


async def test_nothing_can_be_sent_while_a_crashed_actor_ends(world: World) -> None:
    world.stop_hangs = True
    ref = await started(world)
    ref.tell_nowait("fail")
    with pytest.raises(ActorDied):
        await ask_count(ref)
    with pytest.raises(ActorDied):
        ref.tell_nowait("one")
    assert await world.started.get() == "worker"
    assert ref.alive


async def test_a_name_is_given_once(world: World) -> None:
    world.spawn()
    with pytest.raises(ValueError, match="'worker' already"):
        world.spawn()


async def test_nothing_is_spawned_after_close(world: World) -> None:
    await world.supervisor.close()
    with pytest.raises(RuntimeError, match="closing"):
        world.spawn()


async def test_a_capacity_below_one_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        world.spawn(capacity=0)


async def test_statistics_go_on_over_restarts(world: World) -> None:
    ref = await started(world)
    ref.tell_nowait("one")
    await world.crash(ref)
    ref.tell_nowait("two")
    await ask_count(ref)
    await asyncio.sleep(0)
    now = world.supervisor.statistics()["worker"]
    assert (now.restarts, now.handled, now.dropped, now.mailbox.total_in) == (1, 3, 1, 4)
    assert (now.alive, now.last_error) == (True, "ArithmeticError: broken")


async def test_a_busy_actor_leaves_the_loop_to_others(world: World) -> None:
    class Restless(Actor[int]):
        handled = 0

        async def handle(self, message: int) -> None:
            Restless.handled += 1
            self.ref.tell_nowait(message)

    world.supervisor.spawn(Restless, 1, "restless").tell_nowait(1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert 1 < Restless.handled <= 20


def test_a_supervisor_needs_a_running_loop() -> None:
    make: Callable[[], Supervisor] = Supervisor
    with pytest.raises(RuntimeError, match="no running event loop"):
        make()
