"""A bounded mailbox with two lanes: the system lane is read first and stays open when the user lane is full or closed.

Requests come through the user lane, where a full lane is the back-pressure. Feedback (a finished load, a done step)
and the runtime's own signals come through the system lane, which has its own bound and whose senders never wait.
One loop, no thread.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Lane = Literal["user", "system"]


class MailboxFull(Exception):
    """The lane holds as many messages as it may, or still did when the sender's deadline passed."""


class MailboxClosed(Exception):
    """The lane takes no messages; `intake_only` when the user lane alone was closed, to drain what it holds."""

    def __init__(self, text: str, intake_only: bool = False) -> None:
        super().__init__(text)
        self.intake_only = intake_only


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """One mailbox now and since it was made; counts of messages, the high water mark of both lanes together."""

    capacity: int
    system_capacity: int
    depth: int
    system_depth: int
    high_water: int
    total_in: int
    putters_waiting: int


@dataclass(eq=False, slots=True)
class _Letter(Generic[T]):
    message: T
    admitted: asyncio.Future[None] | None = None


class Mailbox(Generic[T]):
    """Two bounded FIFO lanes with one reader; `capacity` bounds the user lane, `system_capacity` the system lane.

    Raises:
        ValueError: a capacity below 1.
    """

    def __init__(self, name: str, capacity: int, system_capacity: int = 1024) -> None:
        for label, value in (("capacity", capacity), ("system_capacity", system_capacity)):
            if value < 1:
                raise ValueError(f"mailbox {name}: {label} is {value}; it must be at least 1")
        self.name = name
        self.capacity = capacity
        self.system_capacity = system_capacity
        self._user: deque[_Letter[T]] = deque()
        self._system: deque[T] = deque()
        self._putters: deque[_Letter[T]] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._open: set[Lane] = {"user", "system"}
        self._high_water = 0
        self._total_in = 0

    @property
    def depth(self) -> int:
        """How many messages wait in both lanes."""
        return len(self._user) + len(self._system)

    @property
    def closed(self) -> bool:
        """Whether both lanes are closed."""
        return not self._open

    def put_nowait(self, message: T, lane: Lane = "user") -> None:
        """Add a message without waiting.

        Raises:
            MailboxClosed: the lane is closed.
            MailboxFull: the lane is full; while senders wait for the user lane, it is.
        """
        self._check_open(lane)
        if lane == "system":
            if len(self._system) >= self.system_capacity:
                raise MailboxFull(f"mailbox {self.name}: system lane holds {self.system_capacity} messages")
            self._system.append(message)
            self._count_arrival()
            return
        if len(self._user) >= self.capacity:
            raise MailboxFull(f"mailbox {self.name} holds {self.capacity} messages")
        self._user.append(_Letter(message))
        self._count_arrival()

    async def put(self, message: T, deadline_s: float | None = None) -> None:
        """Add a message to the user lane, waiting for room, in turn with other senders.

        Cancelled, it withdraws the message, unless the reader took it before.

        Raises:
            MailboxClosed: the lane is closed, or was closed during the wait.
            MailboxFull: there was no room within `deadline_s` seconds.
            ValueError: `deadline_s` is negative or not a number.
        """
        if deadline_s is not None and not (deadline_s >= 0 and math.isfinite(deadline_s)):
            raise ValueError(f"deadline_s is {deadline_s}; it must be a finite number of seconds, 0 or more")
        self._check_open("user")
        if len(self._user) < self.capacity:
            self._user.append(_Letter(message))
            self._count_arrival()
            return
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[None] = loop.create_future()
        letter = _Letter(message, admitted)
        self._putters.append(letter)
        timer = None if deadline_s is None else loop.call_later(deadline_s, self._expire, letter, deadline_s)
        try:
            await admitted
        except asyncio.CancelledError:
            self._withdraw(letter)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def get(self) -> T:
        """Take the next message, waiting for one: system lane first, each lane in order of arrival.

        Cancelled, it takes nothing.

        Raises:
            MailboxClosed: both lanes are closed, or were closed during the wait.
        """
        while not (self._system or self._user):
            if self.closed:
                raise self._closed_error()
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._getters.append(ready)
            try:
                await ready
            except asyncio.CancelledError:
                if ready in self._getters:
                    self._getters.remove(ready)
                elif self.depth:
                    # This reader was woken for a message it will not take: wake another.
                    self._wake_getter()
                raise
        if self._system:
            return self._system.popleft()
        letter = self._user.popleft()
        self._admit_putters()
        return letter.message

    def close_intake(self) -> None:
        """Close the user lane only: messages in it can still be taken, waiting senders get `MailboxClosed`."""
        self._open.discard("user")
        while self._putters:
            self._refuse(self._putters.popleft(), self._closed_error())

    def close(self) -> list[T]:
        """Close both lanes and return the messages nobody took; waiting senders and readers get `MailboxClosed`."""
        self._open.clear()
        self.close_intake()
        while self._getters:
            ready = self._getters.popleft()
            if not ready.done():
                ready.set_exception(self._closed_error())
        untaken = [*self._system, *(letter.message for letter in self._user)]
        self._system.clear()
        self._user.clear()
        return untaken

    def reopen(self) -> None:
        """Take messages in both lanes again, after `close`."""
        self._open = {"user", "system"}

    def statistics(self) -> MailboxStatistics:
        """Counts at this moment; they go on over `close` and `reopen`."""
        return MailboxStatistics(
            capacity=self.capacity,
            system_capacity=self.system_capacity,
            depth=self.depth,
            system_depth=len(self._system),
            high_water=self._high_water,
            total_in=self._total_in,
            putters_waiting=len(self._putters),
        )

    def _check_open(self, lane: Lane) -> None:
        if lane not in self._open:
            raise self._closed_error()

    def _closed_error(self) -> MailboxClosed:
        if self.closed:
            return MailboxClosed(f"mailbox {self.name} is closed")
        return MailboxClosed(f"mailbox {self.name} is draining and takes no more user messages", intake_only=True)

    def _count_arrival(self) -> None:
        self._total_in += 1
        self._high_water = max(self._high_water, self.depth)
        self._wake_getter()

    def _wake_getter(self) -> None:
        while self._getters:
            ready = self._getters.popleft()
            if not ready.done():
                ready.set_result(None)
                return

    def _admit_putters(self) -> None:
        while self._putters and len(self._user) < self.capacity:
            letter = self._putters.popleft()
            if letter.admitted is not None and not letter.admitted.done():
                self._user.append(letter)
                letter.admitted.set_result(None)
                self._count_arrival()

    def _withdraw(self, letter: _Letter[T]) -> None:
        if letter in self._putters:
            self._putters.remove(letter)
        elif letter in self._user:
            self._user.remove(letter)
            self._total_in -= 1
            self._admit_putters()

    def _expire(self, letter: _Letter[T], deadline_s: float) -> None:
        if letter in self._putters:
            self._putters.remove(letter)
            text = f"mailbox {self.name} held {self.capacity} messages for {deadline_s} s"
            self._refuse(letter, MailboxFull(text))

    @staticmethod
    def _refuse(letter: _Letter[T], error: Exception) -> None:
        if letter.admitted is not None and not letter.admitted.done():
            letter.admitted.set_exception(error)
