from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from kvblend.actors.messages import ChatMessage, Generate, StreamEvent
from kvblend.api.server.gate import Gate
from kvblend.api.server.lane import Lane
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.outbox import Outbox
from kvblend.api.server.requests import Create
from tests.api.scripted import ScriptedSystem, hold


class Paper(Outbox):
    """An outbox that keeps what is sent."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def send(self, events: Iterable[dict[str, Any]]) -> None:
        self.events.extend(events)


def lane_of(system: Any) -> tuple[Lane, Paper, Gate]:
    paper, gate = Paper(), Gate(ApiLimits())
    return Lane(system, paper, gate, extended=True), paper, gate


def create(name: str, deadline_ms: float | None = None) -> Create:
    return Create(Generate(name, (ChatMessage("user", "q"),), deadline_ms=deadline_ms), "s", f"event-{name}")


async def test_a_request_cancelled_before_its_turn_ends_without_running() -> None:
    system = ScriptedSystem()
    lane, paper, _ = lane_of(system)
    for name in ("r1", "r2"):
        lane.put(create(name))
    assert lane.cancel("r2")
    await lane.run()
    assert [request.request_id for request in system.requests] == ["r1"]
    assert [e["type"] for e in paper.events if e["response_id"] == "r2"] == [
        "response.created",
        "response.in_progress",
        "response.incomplete",
    ]


async def test_a_cancel_while_it_is_submitted_is_not_lost() -> None:
    system = ScriptedSystem(hold)
    lane, paper, _ = lane_of(system)
    submit = system.submit

    async def cancel_meanwhile(request: Generate) -> Any:
        lane.cancel()
        return await submit(request)

    system.submit = cancel_meanwhile  # type: ignore[method-assign]
    lane.put(create("r1"))
    await lane.run()
    assert paper.events[-1]["type"] == "response.incomplete"
    await system.close()


async def test_time_in_the_queue_counts_for_the_deadline() -> None:
    system = ScriptedSystem()
    lane, paper, _ = lane_of(system)
    lane.put(create("r1", deadline_ms=0.001))
    await asyncio.sleep(0.001)
    await lane.run()
    assert (paper.events[0]["type"], paper.events[0]["status"]) == ("error", 504)
    assert system.requests == []


async def test_what_waits_while_the_server_drains_is_refused() -> None:
    system = ScriptedSystem()
    lane, paper, gate = lane_of(system)
    lane.put(create("r1"))
    gate.close()
    await lane.run()
    assert (paper.events[0]["status"], paper.events[0]["event_id"]) == (503, "event-r1")


async def test_a_stream_that_just_stops_ends_as_failed() -> None:
    class Mute:
        async def drain(self) -> list[StreamEvent]:
            return []

        def abandon(self) -> None:
            return

    system = ScriptedSystem()

    async def submit(_request: Generate) -> Mute:
        return Mute()

    system.submit = submit  # type: ignore[method-assign, assignment]
    lane, paper, _ = lane_of(system)
    lane.put(create("r1"))
    await lane.run()
    assert [event["type"] for event in paper.events] == ["response.failed"]


async def test_cancelling_a_name_that_is_not_here_finds_nothing() -> None:
    lane, _, _ = lane_of(ScriptedSystem())
    lane.put(create("r1"))
    assert not lane.cancel("other")
