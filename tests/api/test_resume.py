"""Events of a response in the background, read again behind the last one that came: `openai` and raw HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from raw_http import RawAnswer, call

from kvblend.actors.messages import Delta, Finished, Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import USAGE, ScriptedSystem, Server, hold, serving

PATH = "/v1/responses"
WORDS = [f" w{number}" for number in range(40)]


class Stepwise:
    """A script that says WORDS: ten at once, the others when `go` is set, each in a turn of its own."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, request: Generate, stream: TokenStream) -> None:
        for index, word in enumerate(WORDS):
            if index == 10:
                await self.go.wait()
            stream.push_nowait(Delta(request.request_id, word, (index,)))
            await asyncio.sleep(0)
        stream.push_nowait(Finished(request.request_id, "stop", USAGE))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(ScriptedSystem()) as running:
        yield running


async def follow(server: Server, name: str, query: str) -> RawAnswer:
    return await call(server.port, "GET", f"{PATH}/{name}?{query}")


async def finished(server: Server, **fields: Any) -> str:
    """The id of a response in the background that has ended."""
    name = (await call(server.port, "POST", PATH, {"input": "q", "background": True, **fields})).json["id"]
    frames = (await follow(server, name, "stream=true")).frames
    assert frames[-1]["type"] == "response.completed"
    assert isinstance(name, str)
    return name


async def test_openais_client_goes_on_behind_the_last_event_that_it_saw() -> None:
    script = Stepwise()
    system = ScriptedSystem(script)
    async with serving(system, ApiLimits(drain_grace_s=5)) as server:
        address = f"http://127.0.0.1:{server.port}/v1"
        async with AsyncOpenAI(base_url=address, api_key="x", max_retries=0, timeout=30) as client:
            stream = await client.responses.create(model="scripted", input="q", background=True, stream=True)
            seen: list[Any] = []
            async for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    break
            # the connection goes, the response goes on
            await stream.close()
            script.go.set()
            name = system.requests[0].request_id
            rest = await client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
            seen += [event async for event in rest]
            whole = await client.responses.retrieve(name)
    assert system.abandoned == []
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "".join(WORDS)
    assert (seen[-1].type, whole.status, whole.output_text) == ("response.completed", "completed", "".join(WORDS))


async def test_several_readers_get_the_same_events_while_it_runs() -> None:
    script = Stepwise()
    async with serving(ScriptedSystem(script), ApiLimits(drain_grace_s=5)) as server:
        name = (await call(server.port, "POST", PATH, {"input": "q", "background": True})).json["id"]
        readers = [asyncio.create_task(follow(server, name, "stream=true")) for _ in range(3)]
        script.go.set()
        bodies = [answer.body for answer in await asyncio.gather(*readers)]
    assert bodies[0].count(b"data: ") > 10
    assert bodies[1:] == bodies[:1] * 2


@pytest.mark.parametrize("after", [-1, 0, 3, 7])
async def test_one_that_has_ended_is_read_again_from_any_event(server: Server, after: int) -> None:
    name = await finished(server)
    whole = (await follow(server, name, "stream=true")).frames
    rest = (await follow(server, name, f"stream=true&starting_after={after}" if after >= 0 else "stream=true")).frames
    assert rest == whole[after + 1 :]


async def test_a_cancel_ends_the_events_of_its_readers() -> None:
    async with serving(ScriptedSystem(hold)) as server:
        name = (await call(server.port, "POST", PATH, {"input": "q", "background": True})).json["id"]
        reader = asyncio.create_task(follow(server, name, "stream=true"))
        await call(server.port, "POST", f"{PATH}/{name}/cancel")
        assert (await reader).frames[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=99", "starting_after"),
        ("stream=true&starting_after=" + "9" * 5000, "starting_after"),
        ("stream=true&after=1", "after"),
    ],
)
async def test_a_bad_parameter_is_named(server: Server, query: str, param: str) -> None:
    answer = await follow(server, await finished(server), query)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_events_are_kept_of_responses_in_the_background_only(server: Server) -> None:
    name = (await call(server.port, "POST", PATH, {"input": "q"})).json["id"]
    answer = await follow(server, name, "stream=true")
    assert (answer.status, answer.error["param"]) == (400, "stream")
    assert (await follow(server, "resp_x", "stream=true")).status == 404
