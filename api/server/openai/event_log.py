"""The events of one response as they went out, for a reader that comes back after its connection was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvblend.api.server.codec import Event
from kvblend.api.server.openai.sse import frame

# a reader may take the stall time for each piece: a long log must not be one
PIECE_BYTES = 64 << 10


class EventLog:
    """Frames by sequence number: the first has 0, none is missing. One writer, any number of readers."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._ended = False
        self._grown = asyncio.Event()
        self.size = 0

    @property
    def newest(self) -> int:
        """The sequence number of the newest event; -1 before the first."""
        return len(self._frames) - 1

    def add(self, events: list[Event], *, ended: bool) -> None:
        """Add the next events; `ended` where the last one is terminal."""
        for event in events:
            if event["sequence_number"] != len(self._frames):
                raise ValueError(f"event {event['sequence_number']} in the place of event {len(self._frames)}")
            self._frames.append(frame(event, event["type"]))
            self.size += len(self._frames[-1])
        self._ended = self._ended or ended
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """All frames behind number `after` (-1: from the start), those to come included, until the terminal one.

        In pieces of whole frames, of `PIECE_BYTES` bytes at most where a frame is not longer itself.
        """
        at = after + 1
        while True:
            grown = self._grown
            if at < len(self._frames):
                start, room = at, PIECE_BYTES
                while at < len(self._frames) and (at == start or len(self._frames[at]) <= room):
                    room -= len(self._frames[at])
                    at += 1
                yield b"".join(self._frames[start:at])
            elif self._ended:
                return
            else:
                await grown.wait()
