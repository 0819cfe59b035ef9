"""What stands before a system passes on all that it does not change."""

from __future__ import annotations

from kvblend.actors.messages import Generate
from kvblend.api.server.forwarding import ForwardingSystem
from tests.api.scripted import ScriptedSystem


class Draining(ScriptedSystem):
    """Notes how long it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.graces_s: list[float] = []

    async def drain(self, grace_s: float) -> None:
        self.graces_s.append(grace_s)


async def test_everything_comes_from_the_system_behind_it() -> None:
    system = ScriptedSystem()
    front = ForwardingSystem(system)
    assert (front.model, front.library, front.fatal) == (system.model, system.library, system.fatal)
    assert front.ready() == system.ready()
    assert front.figures() == system.figures()


async def test_what_is_asked_reaches_the_system_behind_it() -> None:
    system = Draining()
    front = ForwardingSystem(system)
    await front.submit(Generate("r"))
    front.cancel_nowait("r", "enough")
    await front.drain(1.5)
    assert [request.request_id for request in system.requests] == ["r"]
    assert (system.cancelled, system.graces_s) == (["r"], [1.5])
    await system.close()
