"""The tasks an actor owns: their crashes and their end are the actor's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from doer import Do, Doer, Watched, await_cancelled, fail, hang

from kvblend.actors.runtime.actor import Actor, ActorDied, ActorRef, AwaitedCancelled, crash_guard
from kvblend.actors.runtime.supervisor import Supervisor


@pytest.fixture
async def supervisor() -> AsyncIterator[Watched]:
    supervisor = Watched()
    yield supervisor
    await supervisor.close()


@pytest.fixture
async def ref(supervisor: Watched) -> ActorRef[Do]:
    return supervisor.spawn(lambda: Doer(supervisor.started), 2, "doer")


async def test_an_owned_task_that_fails_crashes_an_idle_actor(ref: ActorRef[Do], supervisor: Watched) -> None:
    async def own(actor: Actor[Do]) -> int:
        actor.spawn(fail(), "failing")
        return 0

    ref.tell_nowait(Do(own))
    assert await supervisor.crash() == "ArithmeticError: broken"


async def test_the_crash_of_an_owned_task_is_one_crash(
    ref: ActorRef[Do], supervisor: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    async def own(actor: Actor[Do]) -> int:
        actor.spawn(fail(), "failing")
        return 0

    ref.tell_nowait(Do(own))
    await supervisor.crash()
    assert [record.message for record in caplog.records] == ["actor doer crashed"]


async def test_an_owned_task_that_fails_crashes_a_busy_actor(ref: ActorRef[Do], supervisor: Watched) -> None:
    async def own(actor: Actor[Do]) -> int:
        actor.spawn(fail(), "failing")
        return await hang()

    with pytest.raises(ActorDied):
        await ref.ask(lambda reply: Do(own, reply), 60.0)
    assert await supervisor.crash() == "ArithmeticError: broken"


@pytest.mark.parametrize("owned", [False, True])
async def test_awaiting_something_cancelled_is_a_crash(ref: ActorRef[Do], supervisor: Watched, owned: bool) -> None:
    async def own(actor: Actor[Do]) -> int:
        actor.spawn(await_cancelled(), "stray")
        return 0

    ref.tell_nowait(Do(own if owned else await_cancelled))
    assert "AwaitedCancelled" in await supervisor.crash()


async def test_cancelling_an_owned_task_is_no_crash(ref: ActorRef[Do], supervisor: Watched) -> None:
    async def own(actor: Actor[Do]) -> int:
        started, unstarted = actor.spawn(hang(), "started"), None
        await asyncio.sleep(0)
        started.cancel()
        unstarted = actor.spawn(hang(), "unstarted")
        unstarted.cancel()
        await asyncio.wait([started, unstarted])
        return int(started.cancelled() and unstarted.cancelled())

    assert await ref.ask(lambda reply: Do(own, reply), 60.0) == 1
    assert supervisor.statistics()["doer"].restarts == 0


@pytest.mark.parametrize("crash", [False, True])
async def test_owned_tasks_end_before_stop(crash: bool) -> None:
    doer = Doer()
    seen: list[bool] = []

    async def note_end() -> None:
        try:
            await hang()
        finally:
            seen.append(doer.stopped)

    async def own(actor: Actor[Do]) -> int:
        actor.spawn(note_end(), "noting")
        await asyncio.sleep(0)
        return await fail() if crash else 1

    supervisor = Supervisor(restarts_max=0)
    ref = supervisor.spawn(lambda: doer, 1, "doer")
    if crash:
        with pytest.raises(ActorDied):
            await ref.ask(lambda reply: Do(own, reply), 60.0)
    else:
        await ref.ask(lambda reply: Do(own, reply), 60.0)
    await supervisor.close(deadline_s=3600.0)
    assert (seen, doer.stopped) == ([False], True)


async def test_the_name_of_an_owned_task_says_whose_it_is(ref: ActorRef[Do]) -> None:
    names: list[str] = []

    async def own(actor: Actor[Do]) -> int:
        names.append(actor.spawn(hang(), "reader").get_name())
        return 0

    await ref.ask(lambda reply: Do(own, reply), 60.0)
    assert names == ["doer/reader"]


async def test_the_guard_lets_a_real_cancellation_through() -> None:
    errors: list[BaseException] = []

    async def guarded() -> None:
        with crash_guard(errors.append):
            await hang()

    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert errors == []


async def test_the_guard_reports_a_stray_cancellation() -> None:
    errors: list[BaseException] = []
    with pytest.raises(AwaitedCancelled), crash_guard(errors.append):
        await await_cancelled()
    assert isinstance(errors[0], AwaitedCancelled)
