"""What outlives an actor's instances: counters, and what becomes of messages nobody handled."""

from __future__ import annotations

import asyncio

import pytest

from kvblend.actors.runtime.actor import Actor, ActorDied
from kvblend.actors.runtime.cell import ActorCell
from kvblend.actors.runtime.mailbox import Mailbox


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker(Actor[int]):
    """Takes as many seconds for a message as it says; a negative one fails."""

    def __init__(self, clock: Clock, cell: ActorCell) -> None:
        self.clock = clock
        self.cell = cell

    async def handle(self, message: int) -> None:
        self.clock.now += abs(message)
        if message < 0:
            raise ArithmeticError(message)
        if message == 0:
            self.cell.stopping = True


def make() -> tuple[ActorCell, Worker]:
    clock = Clock()

    def factory() -> Actor[int]:
        return Worker(clock, cell)

    cell = ActorCell(factory, Mailbox("worker", 4, 1), clock)
    return cell, Worker(clock, cell)


async def test_work_counts_messages_and_busy_seconds() -> None:
    cell, worker = make()
    for message in (2, 3, 0):
        cell.ref.tell_nowait(message)
    await cell.work(worker)
    assert (cell.statistics().handled, cell.statistics().busy_s) == (3, 5.0)


async def test_work_stops_before_the_next_message() -> None:
    cell, worker = make()
    for message in (0, 1):
        cell.ref.tell_nowait(message)
    await cell.work(worker)
    assert cell.empty() == (1,)


async def test_an_interrupted_message_is_among_those_lost() -> None:
    cell, worker = make()
    for message in (-1, 2):
        cell.ref.tell_nowait(message)
    with pytest.raises(ArithmeticError):
        await cell.work(worker)
    cell.signal()
    assert cell.empty() == (-1, 2)
    assert cell.statistics().dropped == 2


async def test_a_draining_actor_is_quiet_once_its_mailbox_is_empty() -> None:
    cell, worker = make()
    cell.ref.tell_nowait(1)
    cell.draining = True
    work = asyncio.create_task(cell.work(worker))
    await cell.quiet.wait()
    assert cell.statistics().handled == 1
    cell.stopping = True
    cell.signal()
    await work


async def test_a_signal_is_not_lost_on_a_full_system_lane() -> None:
    cell, worker = make()
    cell.ref.tell_nowait(1, "system")
    cell.stopping = True
    cell.signal()
    await cell.work(worker)
    assert cell.empty() == (1,)


async def test_a_finished_cell_leaves_nobody_waiting() -> None:
    cell, _ = make()
    asker: asyncio.Task[int] = asyncio.create_task(cell.ref.ask(lambda reply: 1, 60.0))
    await asyncio.sleep(0)
    cell.finish()
    with pytest.raises(ActorDied):
        await asker
    assert cell.quiet.is_set()
    assert not cell.statistics().alive
