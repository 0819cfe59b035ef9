"""Who goes when room is needed: least recently used, or least worth keeping. Names and numbers only, no bytes.

A policy knows items by digest. Held items are known and never chosen. All is constant time, however many there are.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, Protocol, get_args

PolicyName = Literal["lru", "cost"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
COST_S_PER_TOKEN = 1e-3
"""What computing a token is taken to cost where nobody has measured it, in seconds."""

_WORTH_MIN, _WORTH_MAX = 2.0**-64, 2.0**64
# frexp's mantissas lie in 0.5..1, so that many steps are eight per power of two
_STEPS_EXPONENT = 4
_STEPS = 1 << _STEPS_EXPONENT


class EvictionPolicy(Protocol):
    """The order in which items go. Calls about unknown items do nothing.

    `free_bytes` is the size of all items that may go.
    """

    free_bytes: int

    def __len__(self) -> int:
        """How many items are known, held ones included."""

    def __contains__(self, digest: bytes) -> bool:
        """Whether an item is known."""

    def add(self, digest: bytes, num_bytes: int, cost_s: float, hits: int = 0) -> None:
        """Know an item, as just used; it may go. `cost_s` is what having it again would take, `hits` its past uses."""

    def fill(self, items: Iterable[tuple[bytes, int, float, int]]) -> None:
        """`add` many items at once, none of them known; the last one counts as used last."""

    def use(self, digest: bytes) -> None:
        """Count one use of an item, held or not."""

    def demote(self, digest: bytes) -> None:
        """Let an item that is not held go before all others, until it is used."""

    def hold(self, digest: bytes) -> None:
        """Keep an item from being chosen. A second call does nothing."""

    def free(self, digest: bytes) -> None:
        """Let a held item go again; it counts as just used."""

    def discard(self, digest: bytes) -> None:
        """Know an item no longer."""

    def pop(self) -> bytes | None:
        """Choose the item that goes and know it no longer; None when all are held."""


def make_policy(name: str) -> EvictionPolicy:
    """The policy of that name. ValueError for a name that is none of `POLICIES`."""
    if name == "lru":
        return LeastRecentlyUsed()
    if name == "cost":
        return LeastWorth()
    raise ValueError(f"the eviction policy is {name!r}; choose {', '.join(POLICIES)}")


class LeastRecentlyUsed:
    """The item whose last use is longest ago goes first, whatever its size and cost."""

    def __init__(self) -> None:
        self.free_bytes = 0
        self._free: OrderedDict[bytes, int] = OrderedDict()
        self._held: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._free) + len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._free or digest in self._held

    def add(self, digest: bytes, num_bytes: int, cost_s: float, hits: int = 0) -> None:
        """Know an item; `cost_s` and `hits` are of no interest here."""
        self.discard(digest)
        self._free[digest] = num_bytes
        self.free_bytes += num_bytes

    def fill(self, items: Iterable[tuple[bytes, int, float, int]]) -> None:
        """Know many items at once."""
        self._free.update((digest, num_bytes) for digest, num_bytes, _, _ in items)
        self.free_bytes = sum(self._free.values())

    def use(self, digest: bytes) -> None:
        """Count one use."""
        if digest in self._free:
            self._free.move_to_end(digest)

    def demote(self, digest: bytes) -> None:
        """Put one at the head of the line."""
        if digest in self._free:
            self._free.move_to_end(digest, last=False)

    def hold(self, digest: bytes) -> None:
        """Keep an item from being chosen."""
        num_bytes = self._free.pop(digest, None)
        if num_bytes is not None:
            self.free_bytes -= num_bytes
            self._held[digest] = num_bytes

    def free(self, digest: bytes) -> None:
        """Let a held item go again."""
        num_bytes = self._held.pop(digest, None)
        if num_bytes is not None:
            self._free[digest] = num_bytes
            self.free_bytes += num_bytes

    def discard(self, digest: bytes) -> None:
        """Know an item no longer."""
        if self._held.pop(digest, None) is None:
            self.free_bytes -= self._free.pop(digest, 0)

    def pop(self) -> bytes | None:
        """Choose the least recently used item."""
        if not self._free:
            return None
        digest, num_bytes = self._free.popitem(last=False)
        self.free_bytes -= num_bytes
        return digest


class _Worth:
    """One item of `LeastWorth`: its size, cost and uses, and the line it stands in (None: held)."""

    __slots__ = ("cost_s", "line", "num_bytes", "uses")

    def __init__(self, num_bytes: int, cost_s: float, uses: int) -> None:
        self.num_bytes = num_bytes
        self.cost_s = cost_s
        self.uses = uses
        self.line: _Line | None = None


class _Line:
    """Free items of one worth, by digest: their priority and the number of their last use, neither below any before."""

    __slots__ = ("is_called", "places", "worth")

    def __init__(self, worth: float) -> None:
        self.worth = worth
        self.places: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self.is_called = False


_DEMOTED = -1.0


class LeastWorth:
    """The item with the least uses x cost / bytes goes first, with ageing as in GreedyDual-Size with frequency.

    An item's worth is added to the worth of what went last at the time of its last use, so what was dear long ago gives
    way in the end. Among equals the least recently used one goes. A worth is rounded down as `round_worth` does, so
    there is a bounded number of them, whatever the number of items; all items of one worth stand in one line, in the
    order of their priorities because the age only grows. The victim is the first of some line: each line that is not
    empty has one call in the heap, at the priority of its first item or of one that was there before.
    """

    def __init__(self) -> None:
        self.free_bytes = 0
        self._items: dict[bytes, _Worth] = {}
        self._lines: dict[float, _Line] = {}
        self._calls: list[tuple[float, int, _Line]] = []
        self._age = 0.0
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._items

    def add(self, digest: bytes, num_bytes: int, cost_s: float, hits: int = 0) -> None:
        """Know an item; having it at all counts as one use."""
        self.discard(digest)
        item = self._items[digest] = _Worth(num_bytes, cost_s, hits + 1)
        self._rank(digest, item)

    def fill(self, items: Iterable[tuple[bytes, int, float, int]]) -> None:
        """Know many items at once, in linear time."""
        lines, order, known = self._lines, self._order, self._items
        for digest, num_bytes, cost_s, hits in items:
            item = known[digest] = _Worth(num_bytes, cost_s, hits + 1)
            worth = round_worth(item.uses * cost_s / max(num_bytes, 1))
            line = lines.get(worth)
            if line is None or not line.is_called:
                self._join(digest, item, worth, self._age + worth)
            else:
                line.places[digest] = (self._age + worth, next(order))
                item.line = line
                self.free_bytes += num_bytes

    def use(self, digest: bytes) -> None:
        """Count one use."""
        item = self._items.get(digest)
        if item is not None:
            item.uses += 1
            if item.line is not None:
                self._leave(digest, item, item.line)
                self._rank(digest, item)

    def demote(self, digest: bytes) -> None:
        """Have an item be worth less than any other."""
        item = self._items.get(digest)
        if item is not None and item.line is not None:
            self._leave(digest, item, item.line)
            self._join(digest, item, _DEMOTED, _DEMOTED)

    def hold(self, digest: bytes) -> None:
        """Keep an item from being chosen."""
        item = self._items.get(digest)
        if item is not None and item.line is not None:
            self._leave(digest, item, item.line)

    def free(self, digest: bytes) -> None:
        """Let a held item go again."""
        item = self._items.get(digest)
        if item is not None and item.line is None:
            self._rank(digest, item)

    def discard(self, digest: bytes) -> None:
        """Know an item no longer."""
        item = self._items.pop(digest, None)
        if item is not None and item.line is not None:
            self._leave(digest, item, item.line)

    def pop(self) -> bytes | None:
        """Choose the item of least worth."""
        while self._calls:
            _, number, line = self._calls[0]
            if not line.places:
                heapq.heappop(self._calls)
                line.is_called = False
                del self._lines[line.worth]
                continue
            digest, first = next(iter(line.places.items()))
            if first[1] != number:
                # who was called has left, and nobody behind it has a lower priority
                heapq.heapreplace(self._calls, (*first, line))
                continue
            line.places.popitem(last=False)
            self.free_bytes -= self._items.pop(digest).num_bytes
            self._age = max(self._age, first[0])
            return digest
        return None

    def _rank(self, digest: bytes, item: _Worth) -> None:
        worth = round_worth(item.uses * item.cost_s / max(item.num_bytes, 1))
        self._join(digest, item, worth, self._age + worth)

    def _join(self, digest: bytes, item: _Worth, worth: float, priority: float) -> None:
        line = self._lines.get(worth)
        if line is None:
            line = self._lines[worth] = _Line(worth)
        place = line.places[digest] = (priority, next(self._order))
        item.line = line
        self.free_bytes += item.num_bytes
        if not line.is_called:
            line.is_called = True
            heapq.heappush(self._calls, (*place, line))

    def _leave(self, digest: bytes, item: _Worth, line: _Line) -> None:
        del line.places[digest]
        item.line = None
        self.free_bytes -= item.num_bytes


def round_worth(worth: float) -> float:
    """`worth` rounded down to a multiple of an eighth of the power of two at or below it, so by a ninth at most.

    What is below 2^-64 counts as 0, what is above 2^64 as that: 1,026 values in all.
    """
    if not worth >= _WORTH_MIN:  # nor any number at all
        return 0.0
    if worth >= _WORTH_MAX:
        return _WORTH_MAX
    mantissa, exponent = math.frexp(worth)
    return math.ldexp(math.floor(mantissa * _STEPS), exponent - _STEPS_EXPONENT)
