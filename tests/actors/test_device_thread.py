"""The device thread: one thread, order, outcomes, cancellation, and the end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import pytest

from kvblend.actors.runtime.device_thread import DeviceBusy, DeviceClosed, DeviceThread


@pytest.fixture
async def device() -> AsyncIterator[DeviceThread]:
    device = DeviceThread("device", capacity=4)
    await device.start()
    yield device
    await device.close()


class Gate:
    """A callable that waits in the device thread until it is opened."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.opened = threading.Event()

    def __call__(self, value: int = 0) -> int:
        self.loop.call_soon_threadsafe(self.entered.set)
        self.opened.wait(30)
        return value


async def running_gate(device: DeviceThread) -> tuple[Gate, asyncio.Future[int]]:
    gate = Gate()
    future = device.submit(gate, 7)
    await gate.entered.wait()
    return gate, future


def fail() -> None:
    raise ArithmeticError("no such tensor")


def stop_iteration() -> None:
    next(iter(()))


async def test_result_reaches_the_loop(device: DeviceThread) -> None:
    assert await device.submit(divmod, 7, 2) == (3, 1)


async def test_everything_runs_in_one_named_thread(device: DeviceThread) -> None:
    threads = {await device.submit(threading.current_thread) for _ in range(3)}
    assert {(thread.name.startswith("device"), thread.ident) for thread in threads} == {(True, device.thread_id)}
    assert device.thread_id != threading.get_ident()


@pytest.mark.uvloop
async def test_order_is_that_of_submission(device: DeviceThread) -> None:
    order: list[int] = []
    await asyncio.gather(*(device.submit(order.append, number) for number in range(4)))
    assert order == [0, 1, 2, 3]


async def test_an_exception_travels_to_the_future(device: DeviceThread) -> None:
    with pytest.raises(ArithmeticError, match="no such tensor"):
        await device.submit(fail)


async def test_stop_iteration_is_turned_into_an_error_a_future_can_carry(device: DeviceThread) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await device.submit(stop_iteration)


async def test_the_thread_survives_an_exception(device: DeviceThread) -> None:
    with pytest.raises(ArithmeticError):
        await device.submit(fail)
    assert await device.submit(int, "3") == 3


async def test_a_full_queue_refuses(device: DeviceThread) -> None:
    gate, first = await running_gate(device)
    waiting = [device.submit(int) for _ in range(3)]
    with pytest.raises(DeviceBusy, match="4 callables"):
        device.submit(int)
    gate.opened.set()
    await asyncio.gather(first, *waiting)


async def test_cancelling_does_not_interrupt_what_runs(device: DeviceThread) -> None:
    gate, future = await running_gate(device)
    future.cancel()
    after = device.submit(int, "3")
    await asyncio.sleep(0)
    assert not after.done()
    gate.opened.set()
    assert await after == 3


async def test_cancelling_skips_what_has_not_begun(device: DeviceThread) -> None:
    ran: list[int] = []
    passed = threading.Event()
    gate, first = await running_gate(device)
    device.submit(ran.append, 1).cancel()
    last = device.submit(passed.set)
    gate.opened.set()
    assert passed.wait(30)  # the loop gets no chance to withdraw the callable
    assert ran == []
    await asyncio.gather(first, last)


async def test_depth_returns_to_zero(device: DeviceThread) -> None:
    future = device.submit(int)
    assert device.depth == 1
    await future
    assert device.depth == 0


async def test_arguments_and_results_are_not_kept(device: DeviceThread) -> None:
    argument = Gate()
    argument.opened.set()
    kept = weakref.ref(argument)
    await device.submit(argument)
    await device.submit(int)
    del argument
    gc.collect()
    assert kept() is None


async def test_close_fails_what_waits_and_finishes_what_runs() -> None:
    device = DeviceThread()
    await device.start()
    gate, running = await running_gate(device)
    waiting = device.submit(int)
    closing = asyncio.create_task(device.close())
    with pytest.raises(DeviceClosed):
        await waiting
    assert not closing.done()
    gate.opened.set()
    await closing
    assert await running == 7


@pytest.mark.uvloop
async def test_close_ends_the_thread_and_is_idempotent() -> None:
    device = DeviceThread("once")
    await device.start()
    await asyncio.gather(device.close(), device.close())
    await device.close()
    assert device.thread_id is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("once")]


async def test_a_cancelled_close_can_be_repeated() -> None:
    device = DeviceThread("again")
    await device.start()
    gate, running = await running_gate(device)
    closing = asyncio.create_task(device.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    gate.opened.set()
    await device.close()
    assert device.thread_id is None
    assert await running == 7


async def test_submit_before_start_and_after_close_is_refused() -> None:
    device = DeviceThread()
    with pytest.raises(DeviceClosed):
        device.submit(int)
    await device.close()
    with pytest.raises(DeviceClosed):
        device.submit(int)


async def test_the_initialiser_runs_first_in_the_thread() -> None:
    device = DeviceThread()
    seen: list[int] = []
    await device.start(lambda: seen.append(threading.get_ident()))
    assert seen == [device.thread_id]
    await device.close()


async def test_a_failing_initialiser_closes_the_thread() -> None:
    device = DeviceThread("broken")
    with pytest.raises(ArithmeticError):
        await device.start(fail)
    assert device.thread_id is None
    with pytest.raises(DeviceClosed):
        device.submit(int)


async def test_a_second_start_is_refused(device: DeviceThread) -> None:
    with pytest.raises(RuntimeError, match="started before"):
        await device.start()


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        DeviceThread(capacity=0)
