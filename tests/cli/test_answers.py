from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvblend.actors.messages import Accepted, Delta, Finished, LoadingDecision, StreamEvent, TokenLogprob, Usage
from kvblend.cli.answers import Answer, equal_start, read_answer
from kvblend.cli.failures import CommandError

USAGE = Usage(mode="full", ttft_ms=3.0)


async def events(*items: StreamEvent) -> AsyncIterator[StreamEvent]:
    for item in items:
        yield item


def answer(text: str, *token_ids: int) -> Answer:
    return Answer(text, token_ids, USAGE, "stop")


async def test_text_ids_and_figures_are_collected() -> None:
    read = await read_answer(
        events(Accepted("r", "m"), Delta("r", "a", (1,)), Delta("r", "b", (2, 3)), Finished("r", "length", USAGE))
    )
    assert read == Answer("ab", (1, 2, 3), USAGE, "length")


async def test_log_probabilities_are_shown_where_there_are_any() -> None:
    top = (TokenLogprob(1, -0.1, "a", b"a"),)
    said = (TokenLogprob(1, -0.1, "a", b"a", top), TokenLogprob(2, -2.0, "<end>"))
    read = await read_answer(events(Delta("r", "a", (1, 2), said), Finished("r", "stop", USAGE)))
    assert read.fields()["logprobs"] == [
        {"token_id": 1, "token": "a", "logprob": -0.1, "top": [{"token_id": 1, "token": "a", "logprob": -0.1}]},
        {"token_id": 2, "token": "<end>", "logprob": -2.0},
    ]


async def test_text_is_handed_on_as_it_comes() -> None:
    seen: list[str] = []
    await read_answer(events(Delta("r", "a"), Delta("r", "b"), Finished("r", "stop", USAGE)), seen.append)
    assert seen == ["a", "b"]


async def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(CommandError, match="without its figures"):
        await read_answer(events(Delta("r", "a")))


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        (answer("", 1, 2, 3, 4), answer("", 1, 2, 9, 4), 0.5),
        (answer("", 1, 2), answer("", 1, 2, 3, 4), 0.5),
        (answer("a b c"), answer("a b c"), 1.0),
        (answer(""), answer(""), 1.0),
        (answer("x", 1), answer("", 2), 0.0),
    ],
)
def test_agreement_is_the_share_of_equal_leading_tokens(first: Answer, second: Answer, share: float) -> None:
    assert equal_start(first, second) == share


def test_the_estimate_of_a_bounded_answer_is_shown() -> None:
    usage = Usage(kl_estimate=0.02, recompute_ratio=0.3)
    fields = Answer("x", (), usage, "stop").fields()
    assert (fields["kl_estimate"], fields["recompute_ratio"]) == (0.02, 0.3)
    assert "kl_estimate" not in Answer("x", (), Usage(), "stop").fields()


def test_what_the_loading_controller_decided_is_shown_where_it_knew_enough() -> None:
    usage = Usage(recompute_ratio=0.4, loading=LoadingDecision(True, 0.15, 900.0, 700.0))
    fields = Answer("x", (), usage, "stop").fields()
    assert (fields["recompute_ratio"], fields["loading"]["ratio_auto"], fields["loading"]["load_ms"]) == (
        0.4,
        True,
        900.0,
    )
    assert "loading" not in Answer("x", (), Usage(), "stop").fields()
