"""Finished sequences whose KV stays on the device for a while: the next turn of a conversation begins with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvblend.actors.messages import BlendOptions

Ids = tuple[int, ...]
# where an answer's text is tokenised anew, behind the prompt it answered, the last token of that prompt may differ
LOOSE_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose KV it is and how it came about: only requests of the same origin may continue it.

    `regime` names the rotation where it changes with the prompt's length. `blend` is None where every row was computed
    behind exactly what stands before it; else the ratio and options that were asked for. So no exact request begins
    with approximate KV, and none with that of other options.
    """

    salt: str
    regime: Ids = ()
    blend: tuple[float, BlendOptions] | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """One sequence: `token_ids` have their KV in the slots that the device knows as `request_id`'s.

    `turns` are the lengths of the prompts that it answered, one after the other; behind each stands an answer.
    """

    request_id: str
    token_ids: Ids
    turns: tuple[int, ...]
    origin: Origin
    pages: int


class KeptSequences:
    """At most `pages_max` pages; the one that was continued or kept the longest ago leaves first."""

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._kept: dict[str, Kept] = {}
        self.pages = 0

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept.values())

    def keep(self, kept: Kept) -> list[Kept]:
        """Take one in; returns those that have to leave for it, itself where it is too large or says nothing new."""
        if kept.pages > self._pages_max or self._covered(kept):
            return [kept]
        gone = [self.drop(other.request_id) for other in list(self) if _begins_with(kept, other)]
        while self.pages + kept.pages > self._pages_max:
            gone.append(self.drop_oldest())
        self._kept[kept.request_id] = kept
        self.pages += kept.pages
        return gone

    def find(self, origins: Sequence[Origin], token_ids: Ids) -> tuple[Kept, int] | None:
        """The kept sequence that `token_ids` continue the furthest, and how many tokens they share.

        A prompt continues another that it is longer than and begins with, but for its last token; or an earlier turn of
        it. What is found counts as used.
        """
        best: tuple[Kept, int] | None = None
        for kept in self:
            if kept.origin not in origins:
                continue
            length = min(_common(kept.token_ids, token_ids), len(token_ids) - 1)
            answered = any(length >= max(1, turn - LOOSE_TOKENS) and len(token_ids) > turn for turn in kept.turns)
            if answered and (best is None or length > best[1]):
                best = kept, length
        if best is not None:
            self._kept[best[0].request_id] = self._kept.pop(best[0].request_id)
        return best

    def drop(self, request_id: str) -> Kept:
        """Forget one. Raises KeyError."""
        kept = self._kept.pop(request_id)
        self.pages -= kept.pages
        return kept

    def drop_oldest(self) -> Kept:
        """Forget the one that leaves next. Raises StopIteration where there is none."""
        return self.drop(next(iter(self._kept)))

    def _covered(self, kept: Kept) -> bool:
        return any(_begins_with(other, kept) for other in self)


def _begins_with(longer: Kept, shorter: Kept) -> bool:
    same = longer.origin == shorter.origin
    return same and longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids


def _common(one: Ids, other: Ids) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    # halving compares slices in C: a loop over 8,000 ids takes half a millisecond of the loop's time
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
