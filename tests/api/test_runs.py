from __future__ import annotations

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Accepted, Delta, Finished, Usage
from kvblend.actors.streams import TokenStream
from kvblend.api.server.events import ResponseEvents
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.kept import KeptResponses
from kvblend.api.server.openai.runs import Run
from kvblend.api.server.requests import FrameIds
from tests.api.scripted import ScriptedSystem

NAME = "resp_1"


def start(kept: KeptResponses | None = None) -> tuple[Run, TokenStream]:
    stream = TokenStream(NAME)
    events = ResponseEvents(NAME, "m", 0.0, FrameIds(), extended=False, generate=True)
    return Run(ScriptedSystem(), stream, events, kept), stream


async def test_it_is_known_before_anything_was_read() -> None:
    kept = KeptResponses(ApiLimits())
    run, _ = start(kept)
    assert kept.get(NAME) == run.response
    assert run.response["status"] == "in_progress"


async def test_closing_it_early_ends_it_once_as_cancelled() -> None:
    run, stream = start()
    run.close()
    run.close()
    assert (run.response["status"], run.ended.is_set(), stream.abandoned) == ("cancelled", True, True)


async def test_closing_it_late_changes_nothing() -> None:
    run, stream = start()
    for event in (Accepted(NAME, "m"), Delta(NAME, "x"), Finished(NAME, "stop", Usage())):
        stream.push_nowait(event)
    response = await run.finish()
    run.close()
    assert run.response is response
    assert response["status"] == "completed"


async def test_a_cancel_that_nobody_asked_for_is_a_failure() -> None:
    run, stream = start()
    stream.push_nowait(Finished(NAME, "cancelled", Usage(), detail="the server is shutting down"))
    with pytest.raises(RequestError, match="shutting down"):
        await run.finish()


async def test_a_cancel_that_was_asked_for_is_none() -> None:
    run, stream = start()
    run.cancel()
    stream.push_nowait(Finished(NAME, "cancelled", Usage()))
    assert (await run.finish())["status"] == "cancelled"


async def test_one_that_is_forgotten_does_not_come_back_with_its_end() -> None:
    kept = KeptResponses(ApiLimits())
    run, stream = start(kept)
    run.forget()
    stream.push_nowait(Finished(NAME, "cancelled", Usage()))
    await run.finish()
    assert kept.get(NAME) is None
