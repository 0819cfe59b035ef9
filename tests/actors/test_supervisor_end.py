"""Supervision: draining and stopping, with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from actor_world import Message, Worker, World, ask_count, open_world, started

from kvblend.actors.runtime.actor import Actor, ActorDied, ActorRef, Reply
from kvblend.actors.runtime.mailbox import MailboxClosed
from kvblend.actors.runtime.supervisor import Supervisor


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as world:
        yield world


async def test_drain_lets_each_finish_what_is_queued(world: World) -> None:
    first, second = world.spawn("first"), world.spawn("second")
    for ref in (first, second):
        ref.tell_nowait("one")
        ref.tell_nowait("two")
    assert await world.supervisor.drain(["first", "second"], 60.0) == ()
    assert [message for name, message in world.seen if name == "first" and message != "(draining)"] == ["one", "two"]
    assert [message for name, message in world.seen if name == "second" and message != "(draining)"] == ["one", "two"]


async def test_drain_goes_in_order(world: World) -> None:
    first, second = world.spawn("first"), world.spawn("second")
    first.tell_nowait("block")
    draining = asyncio.create_task(world.supervisor.drain(["first", "second"], 60.0))
    await world.blocked.wait()
    with pytest.raises(MailboxClosed):
        first.tell_nowait("late")
    second.tell_nowait("in time")
    world.gate.set()
    assert await draining == ()
    assert ("second", "in time") in world.seen


async def test_a_drained_actor_still_takes_feedback(world: World) -> None:
    ref = await started(world)
    await world.supervisor.drain(["worker"], 60.0)
    count: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ref.tell_nowait(Reply(count), "system")
    assert await count == 0


async def test_drain_waits_until_the_actor_has_nothing_open(world: World) -> None:
    world.nothing_open = False
    ref = await started(world)
    draining = asyncio.create_task(world.supervisor.drain(["worker"], 60.0))
    ref.tell_nowait("one")
    await asyncio.wait([draining], timeout=0.01)
    assert not draining.done()
    world.nothing_open = True
    ref.tell_nowait("done", "system")
    assert await draining == ()


async def test_drain_names_those_that_were_late(world: World) -> None:
    slow, quick = world.spawn("slow"), world.spawn("quick")
    slow.tell_nowait("block")
    await world.blocked.wait()
    assert "slow" in await world.supervisor.drain(["slow", "quick"], 0.01)
    with pytest.raises(MailboxClosed):
        quick.tell_nowait("late")


async def test_a_crash_while_draining_ends_the_drain_and_keeps_the_intake_closed(world: World) -> None:
    ref = await started(world)
    ref.tell_nowait("block")
    ref.tell_nowait("fail")
    draining = asyncio.create_task(world.supervisor.drain(["worker"], 60.0))
    await world.blocked.wait()
    await asyncio.sleep(0)
    world.gate.set()
    assert await draining == ()
    assert len(world.made) == 2
    with pytest.raises(MailboxClosed):
        ref.tell_nowait("late")


async def test_draining_an_unknown_actor_closes_nothing(world: World) -> None:
    ref = world.spawn()
    with pytest.raises(ValueError, match="no actor named nobody; there are worker"):
        await world.supervisor.drain(["worker", "nobody"], 1.0)
    ref.tell_nowait("one")


async def test_close_finishes_the_message_at_hand(world: World) -> None:
    ref = await started(world)
    ref.tell_nowait("block")
    ref.tell_nowait("never")
    await world.blocked.wait()
    closing = asyncio.create_task(world.supervisor.close(60.0))
    await asyncio.sleep(0)
    world.gate.set()
    await closing
    assert world.seen == [("worker", "block")]
    assert world.supervisor.statistics()["worker"].dropped == 1


async def test_close_stops_the_last_spawned_first(world: World) -> None:
    for name in ("a", "b", "c"):
        world.spawn(name)
        await world.started.get()
    await world.supervisor.close()
    assert world.stopped == ["c", "b", "a"]


async def test_close_cancels_what_is_late(world: World) -> None:
    ref = await started(world)
    ref.tell_nowait("block")
    await world.blocked.wait()
    await world.supervisor.close(deadline_s=0.01)
    assert (world.seen, world.stopped, world.crashes) == ([], ["worker"], [])


async def test_close_does_not_cut_a_stop_short(world: World) -> None:
    finished: list[bool] = []

    class Slow(Actor[str]):
        async def stop(self) -> None:
            await asyncio.sleep(0.01)
            finished.append(True)

    world.supervisor.spawn(Slow, 1, "slow")
    await asyncio.sleep(0)
    await world.supervisor.close(deadline_s=0)
    assert finished == [True]


async def test_close_right_after_spawn_leaves_nobody_waiting(world: World) -> None:
    ref = world.spawn()
    asker = asyncio.create_task(ask_count(ref))
    await world.supervisor.close(deadline_s=0)
    with pytest.raises(ActorDied):
        await asker


async def test_an_actor_cancelled_before_its_first_step_is_closed(world: World) -> None:
    others: list[ActorRef[Message]] = []

    def spawn_and_fail(*_: object) -> None:
        others.append(supervisor.spawn(lambda: Worker(world), 1, "other"))
        raise LookupError

    supervisor = Supervisor(spawn_and_fail)
    supervisor.spawn(lambda: Worker(world), 1, "worker").tell_nowait("fail")
    await supervisor.fatal
    await supervisor.close()
    assert [ref.alive for ref in others] == [False]
    assert len(world.made) == 1


async def test_close_is_idempotent(world: World) -> None:
    await started(world)
    await asyncio.gather(world.supervisor.close(), world.supervisor.close())
    await world.supervisor.close()
    assert world.stopped == ["worker"]


async def test_an_actor_cannot_close_its_supervisor(world: World) -> None:
    class Closer(Actor[str]):
        async def handle(self, message: str) -> None:
            await world.supervisor.close()

    world.supervisor.spawn(Closer, 1, "closer").tell_nowait("now")
    await asyncio.wait([world.supervisor.fatal], timeout=0.01)
    assert world.crashes == [("closer", "an actor cannot close its supervisor", ("now",))]


@pytest.mark.parametrize("ending", ["close", "crash", "fatal"])
async def test_no_task_outlives_the_supervisor(world: World, ending: str) -> None:
    before = asyncio.all_tasks()

    class Owner(Worker):
        async def start(self) -> None:
            self.spawn(asyncio.Event().wait(), "for ever")
            await super().start()

    ref = world.supervisor.spawn(lambda: Owner(world), 4, "owner")
    await world.started.get()
    world.hook_fails = ending == "fatal"
    if ending != "close":
        ref.tell_nowait("fail")
    await (world.supervisor.fatal if ending == "fatal" else asyncio.sleep(0))
    await world.supervisor.close()
    assert asyncio.all_tasks() == before
