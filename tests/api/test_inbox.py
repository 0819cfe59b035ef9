from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.actors.messages import Accepted, Delta, IngestProgress, TokenLogprob
from kvblend.api.client.inbox import Inbox


@given(st.lists(st.text(min_size=1), min_size=1))
def test_unread_deltas_join_without_loss(texts: list[str]) -> None:
    inbox = Inbox()
    for index, text in enumerate(texts):
        inbox.push(Delta("r", text, (index,), (TokenLogprob(index, -1.0),)))
    ids = tuple(range(len(texts)))
    assert asyncio.run(inbox.get()) == Delta("r", "".join(texts), ids, tuple(TokenLogprob(i, -1.0) for i in ids))


async def test_only_the_newest_unread_progress_is_kept() -> None:
    inbox = Inbox()
    inbox.push(IngestProgress("r", 1, 3))
    inbox.push(IngestProgress("r", 2, 3))
    assert await inbox.get() == IngestProgress("r", 2, 3)


async def test_the_error_comes_after_what_was_pushed_before() -> None:
    inbox = Inbox()
    inbox.push(Accepted("r", "m"))
    inbox.fail(ValueError("first"))
    inbox.fail(ValueError("second"))
    assert await inbox.get() == Accepted("r", "m")
    with pytest.raises(ValueError, match="first"):
        await inbox.get()


async def test_a_cancelled_get_loses_nothing() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.push(Accepted("r", "m"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await inbox.get() == Accepted("r", "m")
