"""Requests that wait for a task."""

from __future__ import annotations

import asyncio

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Generate
from kvblend.actors.waiting import WaitingRoom


@pytest.fixture
def go() -> asyncio.Event:
    return asyncio.Event()


async def test_a_request_waits_for_the_task(go: asyncio.Event) -> None:
    task = asyncio.create_task(go.wait())
    waiting = asyncio.create_task(WaitingRoom(1).wait(Generate("r"), task, "it"))
    await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    assert await waiting == Generate("r")


async def test_a_deadline_shrinks_meanwhile(go: asyncio.Event) -> None:
    go.set()
    request = await WaitingRoom(1).wait(Generate("r", deadline_ms=1e6), asyncio.create_task(go.wait()), "it")
    assert request.deadline_ms is not None
    assert 0.0 < request.deadline_ms < 1e6


async def test_a_deadline_that_passes_is_an_error_and_the_task_goes_on(go: asyncio.Event) -> None:
    task = asyncio.create_task(go.wait())
    with pytest.raises(RequestError, match="deadline_ms: 1 ms passed while it ran"):
        await WaitingRoom(1).wait(Generate("r", deadline_ms=1.0), task, "it")
    assert not task.done()
    go.set()
    await task


async def test_too_many_are_refused(go: asyncio.Event) -> None:
    room, task = WaitingRoom(1), asyncio.create_task(go.wait())
    first = asyncio.create_task(room.wait(Generate("a"), task, "it"))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="1 requests wait for it"):
        await room.wait(Generate("b"), task, "it")
    go.set()
    await first
