from __future__ import annotations

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Accepted, ChatMessage, Delta, Failed, Finished, Generate, StreamEvent, TokenLogprob
from kvblend.actors.streams import TokenStream
from kvblend.api.server.openai.answers import Asked, collect, submit_all
from tests.api.scripted import USAGE, ScriptedSystem


def stream(*events: StreamEvent) -> TokenStream:
    made = TokenStream("r")
    for event in events:
        made.push_nowait(event)
    return made


async def test_text_is_joined_up_to_the_end() -> None:
    end = Finished("r", "length", USAGE)
    assert await collect(stream(Accepted("r", "m"), Delta("r", "a"), Delta("r", "b"), end)) == ("ab", [], end)


async def test_log_probabilities_are_joined_too() -> None:
    one, other = TokenLogprob(1, -0.5), TokenLogprob(2, -1.5)
    said = (Delta("r", "a", (1,), (one,)), Accepted("r", "m"), Delta("r", "", (2,), (other,)))
    end = Finished("r", "stop", USAGE)
    assert await collect(stream(*said, end)) == ("a", [one, other], end)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (Failed("r", "too_large", "x", "input"), "too_large"),
        (Finished("r", "cancelled", USAGE, detail="shutting down"), "overloaded"),
    ],
)
async def test_an_end_that_is_none_is_an_error(end: StreamEvent, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        await collect(stream(Delta("r", "a"), end))
    assert caught.value.code == code


async def test_one_refusal_gives_up_the_other_prompts_of_the_call() -> None:
    system = ScriptedSystem()
    first = TokenStream("r-0")

    async def submit(request: Generate) -> TokenStream:
        if request.request_id == "r-0":
            return first
        raise RequestError("invalid_request", "prompt is empty", "prompt")

    system.submit = submit  # type: ignore[method-assign]
    requests = [Generate(name, (ChatMessage("user", "q"),)) for name in ("r-0", "r-1")]
    with pytest.raises(RequestError) as caught:
        await submit_all(system, Asked(requests, False, False))
    assert (caught.value.param, first.abandoned) == ("prompt[1]", True)
