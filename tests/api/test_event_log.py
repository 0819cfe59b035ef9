from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.api.server.openai.event_log import PIECE_BYTES, EventLog


def event(number: int) -> dict[str, object]:
    return {"type": "t", "sequence_number": number}


def numbers(frames: bytes) -> list[int]:
    lines = frames.decode().splitlines()
    return [json.loads(line[6:])["sequence_number"] for line in lines if line.startswith("data: ")]


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(-1, 12), st.integers(0, 8))
async def test_a_reader_gets_all_behind_its_number_once_and_in_order(sizes: list[int], after: int, at: int) -> None:
    """It comes when `at` of the batches were written."""
    log, total, got = EventLog(), 0, list[int]()

    async def read() -> None:
        async for frames in log.follow(after):
            got.extend(numbers(frames))

    reader: asyncio.Task[None] | None = None
    for index, size in enumerate(sizes):
        if index == at:
            reader = asyncio.create_task(read())
        log.add([event(total + step) for step in range(size)], ended=index == len(sizes) - 1)
        total += size
        await asyncio.sleep(0)
    if not sizes:
        log.add([], ended=True)
    await (reader or asyncio.create_task(read()))
    assert got == list(range(after + 1, total))
    assert log.newest == total - 1


async def test_a_long_log_comes_in_pieces() -> None:
    log = EventLog()
    log.add([{**event(number), "delta": "x" * 1000} for number in range(300)], ended=True)
    pieces = [len(piece) async for piece in log.follow(-1)]
    assert max(pieces) <= PIECE_BYTES
    assert sum(pieces) == log.size


async def test_a_number_out_of_turn_is_refused() -> None:
    log = EventLog()
    with pytest.raises(ValueError, match="event 1 in the place of event 0"):
        log.add([event(1)], ended=False)
