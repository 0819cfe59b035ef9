"""Who goes when room is needed: least recently used, or least worth keeping. Names and numbers only, no bytes.

A policy knows items by digest. Held items are known and never chosen. All is constant time, or logarithmic for `cost`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, Protocol, get_args

PolicyName = Literal["lru", "cost"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
COST_S_PER_TOKEN = 1e-3
"""What computing a token is taken to cost where nobody has measured it, in seconds."""


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
    """One item of `LeastWorth`: what each of its uses is worth per byte, and its place in the heap (None: held)."""

    __slots__ = ("cost_s", "num_bytes", "place", "uses")

    def __init__(self, num_bytes: int, cost_s: float, uses: int) -> None:
        self.num_bytes = num_bytes
        self.cost_s = cost_s
        self.uses = uses
        self.place: tuple[float, int, bytes] | None = None


class LeastWorth:
    """The item with the least uses x cost / bytes goes first, with ageing as in GreedyDual-Size with frequency.

    An item's worth is added to the worth of what went last at the time of its last use, so what was dear long ago gives
    way in the end. Among equals the least recently used one goes.
    """

    def __init__(self) -> None:
        self.free_bytes = 0
        self._items: dict[bytes, _Worth] = {}
        # places that no item has any more stay in the heap until they come up, or outnumber the others
        self._heap: list[tuple[float, int, bytes]] = []
        self._num_free = 0
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
        self._count(item, 1)
        self._rank(digest, item)

    def fill(self, items: Iterable[tuple[bytes, int, float, int]]) -> None:
        """Know many items at once, in linear time."""
        for digest, num_bytes, cost_s, hits in items:
            item = self._items[digest] = _Worth(num_bytes, cost_s, hits + 1)
            item.place = (self._age + item.uses * cost_s / max(num_bytes, 1), next(self._order), digest)
            self._heap.append(item.place)
            self._num_free += 1
            self.free_bytes += num_bytes
        heapq.heapify(self._heap)

    def use(self, digest: bytes) -> None:
        """Count one use."""
        item = self._items.get(digest)
        if item is not None:
            item.uses += 1
            if item.place is not None:
                self._rank(digest, item)

    def demote(self, digest: bytes) -> None:
        """Have an item be worth less than any other."""
        item = self._items.get(digest)
        if item is not None and item.place is not None:
            self._put(item, (-1.0, next(self._order), digest))

    def hold(self, digest: bytes) -> None:
        """Keep an item from being chosen."""
        item = self._items.get(digest)
        if item is not None and item.place is not None:
            item.place = None
            self._count(item, -1)

    def free(self, digest: bytes) -> None:
        """Let a held item go again."""
        item = self._items.get(digest)
        if item is not None and item.place is None:
            self._count(item, 1)
            self._rank(digest, item)

    def discard(self, digest: bytes) -> None:
        """Know an item no longer."""
        item = self._items.pop(digest, None)
        if item is not None and item.place is not None:
            self._count(item, -1)

    def pop(self) -> bytes | None:
        """Choose the item of least worth."""
        while self._heap:
            place = heapq.heappop(self._heap)
            item = self._items.get(place[2])
            if item is not None and item.place is place:
                del self._items[place[2]]
                self._count(item, -1)
                self._age = max(self._age, place[0])
                return place[2]
        return None

    def _rank(self, digest: bytes, item: _Worth) -> None:
        worth = item.uses * item.cost_s / max(item.num_bytes, 1)
        self._put(item, (self._age + worth, next(self._order), digest))

    def _put(self, item: _Worth, place: tuple[float, int, bytes]) -> None:
        item.place = place
        heapq.heappush(self._heap, item.place)
        if len(self._heap) > 2 * self._num_free + 64:
            self._heap = [one.place for one in self._items.values() if one.place is not None]
            heapq.heapify(self._heap)

    def _count(self, item: _Worth, sign: int) -> None:
        self._num_free += sign
        self.free_bytes += sign * item.num_bytes
