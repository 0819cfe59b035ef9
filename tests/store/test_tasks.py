from __future__ import annotations

import asyncio

import pytest

from kvblend.store.tasks import TaskSet


async def test_a_result_comes_back() -> None:
    async def work() -> int:
        return 3

    assert await TaskSet().run(work(), "work") == 3


async def test_an_error_reaches_who_waits() -> None:
    async def work() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        await TaskSet().run(work(), "work")


async def test_a_cancelled_waiter_leaves_the_work_running() -> None:
    tasks, gate, started, done = TaskSet(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await gate.wait()
        done.set()

    waiter = asyncio.create_task(tasks.run(work(), "work"))
    await started.wait()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert len(tasks) == 1
    gate.set()
    await tasks.drain()
    assert done.is_set()


async def test_drain_waits_for_tasks_started_meanwhile() -> None:
    tasks, done = TaskSet(), asyncio.Event()

    async def second() -> None:
        done.set()

    async def first() -> None:
        tasks.start(second(), "second")

    tasks.start(first(), "first")
    await tasks.drain()
    assert done.is_set()
    assert len(tasks) == 0


async def test_an_error_nobody_waits_for_is_no_complaint() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    tasks = TaskSet()

    async def work() -> None:
        raise ValueError("planted")

    tasks.start(work(), "work")
    await tasks.drain()
    assert complaints == []
