"""The stream of one request: order, joining, the end, and readers that come and go."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import (
    TERMINAL,
    Accepted,
    Delta,
    Failed,
    Finished,
    IngestProgress,
    Planned,
    StreamEvent,
    TokenLogprob,
    Usage,
)
from kvblend.actors.streams import StreamEnded, TokenStream

ACCEPTED = Accepted("r", "tiny")
FINISHED = Finished("r", "stop", Usage(output_tokens=3))
FAILED = Failed("r", "overloaded", "no room", "documents")


def delta(text: str, *token_ids: int) -> Delta:
    return Delta("r", text, token_ids)


async def test_drain_returns_everything_in_order() -> None:
    stream = TokenStream("r")
    planned = Planned("r", Usage())
    for event in (ACCEPTED, planned, delta("a", 1), FINISHED):
        stream.push_nowait(event)
    assert await stream.drain() == [ACCEPTED, planned, delta("a", 1), FINISHED]


async def test_log_probabilities_of_joined_deltas_are_joined() -> None:
    one, other = TokenLogprob(1, -0.5), TokenLogprob(2, -1.5)
    stream = TokenStream("r")
    stream.push_nowait(Delta("r", "a", (1,), (one,)))
    stream.push_nowait(Delta("r", "b", (2,), (other,)))
    assert await stream.drain() == [Delta("r", "ab", (1, 2), (one, other))]


async def test_drain_waits_for_an_event() -> None:
    stream = TokenStream("r")
    reader = asyncio.create_task(stream.drain())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push_nowait(ACCEPTED)
    assert await reader == [ACCEPTED]


async def test_drain_is_empty_after_the_terminal_event() -> None:
    stream = TokenStream("r")
    stream.push_nowait(FINISHED)
    await stream.drain()
    assert await stream.drain() == []


async def test_drain_nowait_of_nothing() -> None:
    assert TokenStream("r").drain_nowait() == []


async def test_neighbouring_deltas_join() -> None:
    stream = TokenStream("r")
    for event in (delta("a", 1), delta("b"), delta("c", 2, 3)):
        stream.push_nowait(event)
    assert stream.drain_nowait() == [delta("abc", 1, 2, 3)]


async def test_read_deltas_do_not_join_with_later_ones() -> None:
    stream = TokenStream("r")
    stream.push_nowait(delta("a", 1))
    stream.drain_nowait()
    stream.push_nowait(delta("b", 2))
    assert stream.drain_nowait() == [delta("b", 2)]


async def test_the_newest_progress_is_kept() -> None:
    stream = TokenStream("r")
    for done in (1, 2, 3):
        stream.push_nowait(IngestProgress("r", done, 3))
    assert stream.drain_nowait() == [IngestProgress("r", 3, 3)]


async def test_progress_between_deltas_keeps_the_bound() -> None:
    stream = TokenStream("r")
    stream.push_nowait(ACCEPTED)
    stream.push_nowait(Planned("r", Usage()))
    for done in range(50):
        stream.push_nowait(delta("x", done))
        stream.push_nowait(IngestProgress("r", done, 50))
    stream.push_nowait(FINISHED)
    assert stream.depth == 6


async def test_nothing_after_the_terminal_event() -> None:
    stream = TokenStream("r")
    stream.push_nowait(FINISHED)
    with pytest.raises(StreamEnded, match="r: Failed after Finished"):
        stream.push_nowait(FAILED)


async def test_an_event_of_another_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'other'.*'r'"):
        TokenStream("r").push_nowait(Accepted("other", "tiny"))


async def test_terminal_is_known_before_it_is_read() -> None:
    stream = TokenStream("r")
    assert (stream.terminal, stream.ended) == (None, False)
    stream.push_nowait(FAILED)
    assert (stream.terminal, stream.ended) == (FAILED, True)


async def test_iteration_ends_after_the_terminal_event() -> None:
    stream = TokenStream("r")

    async def read() -> list[StreamEvent]:
        return [event async for event in stream]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    for event in (ACCEPTED, delta("a", 1), FINISHED):
        stream.push_nowait(event)
    assert await reader == [ACCEPTED, delta("a", 1), FINISHED]


async def test_a_cancelled_drain_loses_nothing() -> None:
    stream = TokenStream("r")
    reader = asyncio.create_task(stream.drain())
    await asyncio.sleep(0)
    stream.push_nowait(ACCEPTED)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert stream.drain_nowait() == [ACCEPTED]


async def test_a_cancelled_result_loses_nothing() -> None:
    stream = TokenStream("r")
    stream.push_nowait(delta("a", 1))
    reader = asyncio.create_task(stream.result())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.push_nowait(delta("b", 2))
    stream.push_nowait(FINISHED)
    assert await stream.result() == ("ab", FINISHED)


async def test_result_raises_what_failed() -> None:
    stream = TokenStream("r")
    stream.push_nowait(FAILED)
    with pytest.raises(RequestError, match="no room") as caught:
        await stream.result()
    assert (caught.value.code, caught.value.param) == ("overloaded", "documents")


async def test_result_after_everything_was_read() -> None:
    stream = TokenStream("r")
    stream.push_nowait(FINISHED)
    stream.drain_nowait()
    assert await stream.result() == ("", FINISHED)


async def test_abandon_reports_once() -> None:
    reported: list[str] = []
    stream = TokenStream("r", reported.append)
    stream.abandon()
    stream.abandon()
    assert reported == ["r"]
    assert stream.abandoned


async def test_abandon_after_the_end_reports_nothing() -> None:
    reported: list[str] = []
    stream = TokenStream("r", reported.append)
    stream.push_nowait(FINISHED)
    stream.abandon()
    assert reported == []
    assert stream.drain_nowait() == [FINISHED]


async def test_abandoned_keeps_only_the_terminal_event() -> None:
    stream = TokenStream("r")
    stream.push_nowait(delta("a", 1))
    stream.abandon()
    stream.push_nowait(delta("b", 2))
    stream.push_nowait(FINISHED)
    assert stream.drain_nowait() == [FINISHED]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("delta"), st.text(min_size=1, max_size=3), st.lists(st.integers(0, 9), max_size=2)),
        st.sampled_from([("progress", "", []), ("accepted", "", []), ("drain", "", []), ("next", "", [])]),
        st.sampled_from([("wait", "", []), ("cancel", "", [])]),
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_whatever_the_reader_does_it_gets_all_text_and_one_end(
    steps: list[tuple[str, str, list[int]]], fails: bool
) -> None:
    asyncio.run(_read_in_steps(steps, FAILED if fails else FINISHED))


async def _read_in_steps(steps: list[tuple[str, str, list[int]]], terminal: Finished | Failed) -> None:
    stream = TokenStream("r")
    pushed: list[Delta] = []
    got: list[StreamEvent] = []
    reader: asyncio.Task[list[StreamEvent]] | None = None
    for step, (what, text, token_ids) in enumerate(steps):
        if what == "delta":
            pushed.append(delta(text, *token_ids))
            stream.push_nowait(pushed[-1])
        elif what == "progress":
            stream.push_nowait(IngestProgress("r", step, 100))
        elif what == "accepted":
            stream.push_nowait(ACCEPTED)
        elif what == "wait":
            reader = reader or asyncio.create_task(stream.drain())
            await asyncio.sleep(0)
        elif reader is not None:
            if what == "cancel":
                reader.cancel()
            await asyncio.wait([reader], timeout=0 if stream.depth == 0 else None)
            if reader.done():
                got += [] if reader.cancelled() else reader.result()
                reader = None
        elif what == "drain":
            got += stream.drain_nowait()
        elif what == "next" and stream.depth:
            got.append(await anext(stream))
        assert stream.depth <= 6
    stream.push_nowait(terminal)
    if reader is not None:
        got += await reader
    got += [event async for event in stream]
    deltas = [event for event in got if isinstance(event, Delta)]
    assert "".join(event.text for event in deltas) == "".join(event.text for event in pushed)
    assert [i for event in deltas for i in event.token_ids] == [i for event in pushed for i in event.token_ids]
    assert [event for event in got if isinstance(event, TERMINAL)] == [terminal]
    assert got[-1] == terminal
