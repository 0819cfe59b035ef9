"""Five hundred answers at once over twenty connections: every delta arrives, in order, once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

from kvblend.actors.messages import Delta, Finished, Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import USAGE, Peer, ScriptedSystem, serving

CONNECTIONS, LANES, TOKENS = 20, 25, 30


class Recorder:
    """A script that waits until all are there, then says words of its own; `emitted` has them by request."""

    def __init__(self) -> None:
        self.emitted: dict[str, list[str]] = defaultdict(list)
        self.arrived = 0
        self.all_there = asyncio.Event()

    async def __call__(self, request: Generate, stream: TokenStream) -> None:
        self.arrived += 1
        if self.arrived == CONNECTIONS * LANES:
            self.all_there.set()
        await self.all_there.wait()
        for number in range(TOKENS):
            word = f"{request.request_id[-6:]}:{number} "
            self.emitted[request.request_id].append(word)
            stream.push_nowait(Delta(request.request_id, word, (number,)))
            await asyncio.sleep(0)
        stream.push_nowait(Finished(request.request_id, "stop", USAGE))


async def read_all(peer: Peer, index: int) -> dict[str, list[dict[str, Any]]]:
    """The events of all lanes of one connection, by response."""
    for lane in range(LANES):
        await peer.create(stream_id=f"lane-{lane}", input=f"{index}-{lane}")
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    ended = 0
    while ended < LANES:
        frame = await peer.receive()
        events[frame["response_id"]].append(frame)
        ended += frame["type"] == "response.completed"
    return events


async def test_five_hundred_streams_over_twenty_connections() -> None:
    script = Recorder()
    limits = ApiLimits(lanes_max=LANES, drain_grace_s=0, close_grace_s=1)
    async with serving(ScriptedSystem(script), limits) as server, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(server.peer()) for _ in range(CONNECTIONS)]
        got = await asyncio.gather(*(read_all(peer, index) for index, peer in enumerate(peers)))
    responses = {name: events for one in got for name, events in one.items()}
    assert len(responses) == len(script.emitted) == CONNECTIONS * LANES
    for name, events in responses.items():
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in deltas) == "".join(script.emitted[name])
        assert [token for event in deltas for token in event["token_ids"]] == list(range(TOKENS))
        # lanes of one connection are told apart
        assert len({event["stream_id"] for event in events}) == 1
