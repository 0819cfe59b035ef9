"""Actors and their references: messages and questions, answered or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from doer import Do, Doer, Watched, fail, hang, returning

from kvblend.actors.runtime.actor import Actor, ActorDied, ActorRef, AskTimeout, Reply
from kvblend.actors.runtime.mailbox import Mailbox, MailboxClosed, MailboxFull
from kvblend.actors.runtime.supervisor import Supervisor


@pytest.fixture
async def supervisor() -> AsyncIterator[Watched]:
    supervisor = Watched()
    yield supervisor
    await supervisor.close()


@pytest.fixture
async def ref(supervisor: Watched) -> ActorRef[Do]:
    return supervisor.spawn(lambda: Doer(supervisor.started), 2, "doer")


async def test_ask_returns_the_answer(ref: ActorRef[Do]) -> None:
    assert await ref.ask(lambda reply: Do(returning(3), reply), 60.0) == 3


async def test_ask_times_out(ref: ActorRef[Do], supervisor: Watched) -> None:
    with pytest.raises(AskTimeout, match=r"doer did not answer within 0\.01 s"):
        await ref.ask(lambda reply: Do(hang, reply), 0.01)
    await supervisor.close(deadline_s=0)


async def test_ask_raises_what_the_actor_put_into_the_reply(ref: ActorRef[Do]) -> None:
    def build(reply: Reply[int]) -> Do:
        reply.fail(KeyError("unknown chunk"))
        return Do(returning(0), reply)

    with pytest.raises(KeyError, match="unknown chunk"):
        await ref.ask(build, 60.0)


async def test_a_timeout_error_of_the_actor_is_not_taken_for_the_askers_own(ref: ActorRef[Do]) -> None:
    def build(reply: Reply[int]) -> Do:
        reply.fail(TimeoutError("disk"))
        return Do(returning(0), reply)

    with pytest.raises(TimeoutError, match="disk"):
        await ref.ask(build, 60.0)


async def test_an_asker_hears_of_a_crash_at_once(ref: ActorRef[Do]) -> None:
    with pytest.raises(ActorDied, match="doer died") as caught:
        await ref.ask(lambda reply: Do(fail, reply), 60.0)
    assert isinstance(caught.value.__cause__, ArithmeticError)


async def test_an_asker_whose_message_still_waits_hears_of_a_crash(ref: ActorRef[Do]) -> None:
    gate = asyncio.Event()

    async def wait_and_fail(_: Actor[Do]) -> int:
        await gate.wait()
        return await fail()

    ref.tell_nowait(Do(wait_and_fail))
    asker: asyncio.Task[int] = asyncio.create_task(ref.ask(lambda reply: Do(returning(1), reply), 60.0))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(ActorDied):
        await asker


async def test_an_asker_that_waits_for_room_hears_of_a_crash() -> None:
    mailbox: Mailbox[Do] = Mailbox("doer", 1)
    ref: ActorRef[Do] = ActorRef(mailbox)  # type: ignore[arg-type]
    ref.tell_nowait(Do(hang))
    asker: asyncio.Task[int] = asyncio.create_task(ref.ask(lambda reply: Do(returning(1), reply), 60.0))
    await asyncio.sleep(0)
    mailbox.close()
    mailbox.reopen()
    with pytest.raises(ActorDied):
        await asker


async def test_a_ref_stays_valid_over_a_restart(ref: ActorRef[Do], supervisor: Watched) -> None:
    ref.tell_nowait(Do(fail))
    await supervisor.crash()
    assert await ref.ask(lambda reply: Do(returning(5), reply), 60.0) == 5


async def test_a_stopped_actor_is_dead_to_everyone(ref: ActorRef[Do], supervisor: Watched) -> None:
    await supervisor.close()
    assert not ref.alive
    with pytest.raises(ActorDied):
        ref.tell_nowait(Do(returning(1)))
    with pytest.raises(ActorDied):
        await ref.tell(Do(returning(1)))
    with pytest.raises(ActorDied):
        await ref.ask(lambda reply: Do(returning(1), reply), 60.0)


async def test_a_draining_actor_is_not_dead(ref: ActorRef[Do], supervisor: Watched) -> None:
    await supervisor.drain(["doer"], 60.0)
    with pytest.raises(MailboxClosed) as caught:
        ref.tell_nowait(Do(returning(1)))
    assert not isinstance(caught.value, ActorDied)
    assert ref.alive


async def test_tell_waits_no_longer_than_its_deadline(ref: ActorRef[Do], supervisor: Watched) -> None:
    await supervisor.started.get()
    await asyncio.sleep(0)
    for _ in range(2):
        ref.tell_nowait(Do(hang))
    await asyncio.sleep(0)
    ref.tell_nowait(Do(hang))
    with pytest.raises(MailboxFull):
        await ref.tell(Do(hang), deadline_s=0)
    await supervisor.close(deadline_s=0)


async def test_feedback_through_the_system_lane_overtakes(ref: ActorRef[Do]) -> None:
    order: list[str] = []

    def noting(word: str) -> Callable[[Actor[Do]], Awaitable[int]]:
        async def action(_: Actor[Do]) -> int:
            order.append(word)
            return 0

        return action

    ref.tell_nowait(Do(noting("user")))
    ref.tell_nowait(Do(noting("system")), "system")
    await ref.ask(lambda reply: Do(returning(0), reply), 60.0)
    assert order == ["system", "user"]


async def test_a_late_answer_is_dropped() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reply = Reply(answer)
    answer.cancel()
    reply.send(1)
    reply.fail(ValueError())
    assert not reply.open


async def test_only_the_first_answer_counts() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reply = Reply(answer)
    reply.send(1)
    reply.send(2)
    assert await answer == 1


async def test_an_unattached_actor_has_neither_name_nor_tasks() -> None:
    with pytest.raises(RuntimeError, match="not attached"):
        _ = Doer().name
    with pytest.raises(RuntimeError, match="only while it runs"):
        Doer().spawn(hang(), "nobody's")


async def test_a_factory_must_not_return_the_same_actor_twice() -> None:
    doer = Doer()
    supervisor = Supervisor(restarts_max=1)
    supervisor.spawn(lambda: doer, 1, "doer").tell_nowait(Do(fail))
    await supervisor.fatal
    assert "returned the same Doer again" in str(supervisor.statistics()["doer"].last_error)
    await supervisor.close()


async def test_an_actor_without_handler_says_so() -> None:
    with pytest.raises(TypeError, match="does not handle str"):
        await Actor[str]().handle("word")
