from __future__ import annotations

import pytest

from kvblend.actors.errors import RequestError
from kvblend.api.server.gate import Gate
from kvblend.api.server.limits import ApiLimits


class Guest:
    asked_to_leave = False

    def finish(self) -> None:
        self.asked_to_leave = True


async def test_the_limit_of_connections_is_overloaded() -> None:
    gate, guest = Gate(ApiLimits(connections_max=1)), Guest()
    gate.check()
    gate.enter(guest)
    with pytest.raises(RequestError, match="limit of 1 connections") as caught:
        gate.check()
    assert caught.value.status == 503
    gate.leave(guest)
    gate.check()


async def test_closing_asks_everyone_to_leave_and_takes_nobody() -> None:
    gate, guest = Gate(ApiLimits()), Guest()
    gate.enter(guest)
    gate.close()
    assert guest.asked_to_leave
    with pytest.raises(RequestError, match="shutting down"):
        gate.check()


async def test_waiting_ends_when_the_last_one_left() -> None:
    gate, guest = Gate(ApiLimits()), Guest()
    gate.enter(guest)
    assert not await gate.wait_empty(0.01)
    gate.leave(guest)
    assert await gate.wait_empty(5)
