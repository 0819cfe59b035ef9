"""A prompt cut into segments, and what of it is reused: token ids and spans only, no tensors.

Torch-free on purpose: the pure cores of the actors plan with these types.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class SegmentKind(StrEnum):
    """What a stretch of the prompt is."""

    SYSTEM = "system"
    CHUNK = "chunk"
    QUESTION = "question"


class Reuse(StrEnum):
    """Where a segment's KV comes from in one request."""

    EXACT = "exact"
    """Stored KV that was computed behind exactly the tokens that stand before it here, in the leading exact run."""
    CACHED = "cached"
    """Stored KV computed behind something else: its rows are the B-rows a selector chooses from."""
    FRESH = "fresh"
    """Computed in this request."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`token_ids` at positions `start..end-1` of the prompt."""

    kind: SegmentKind
    token_ids: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """One past the segment's last position."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Segments in prompt order, gapless from position 0."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[SegmentKind, Sequence[int]]]) -> PromptLayout:
        """Place `(kind, token ids)` parts one after another; empty parts are refused with ValueError."""
        segments: list[Segment] = []
        start = 0
        for index, (kind, ids) in enumerate(parts):
            if not ids:
                raise ValueError(f"segment {index} ({kind}) has no tokens")
            segments.append(Segment(kind, tuple(ids), start))
            start += len(ids)
        return cls(tuple(segments))

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self.segments[-1].end if self.segments else 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids of the prompt."""
        return tuple(itertools.chain.from_iterable(segment.token_ids for segment in self.segments))

    def without(self, index: int) -> PromptLayout:
        """The layout without segment `index`; what stood behind it moves up. IndexError where there is none."""
        parts = [(segment.kind, segment.token_ids) for segment in self.segments]
        del parts[index]
        return PromptLayout.of(parts)

    def with_echo(self) -> PromptLayout:
        """The layout with its last segment a second time behind itself. IndexError for an empty one."""
        parts = [(segment.kind, segment.token_ids) for segment in self.segments]
        return PromptLayout.of([*parts, parts[-1]])

    def chunks(self) -> Iterator[tuple[int, Segment]]:
        """The chunk segments with their index among all segments."""
        return ((i, s) for i, s in enumerate(self.segments) if s.kind is SegmentKind.CHUNK)


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """What one request reuses: `reuse[i]` says where segment i's KV comes from.

    `exact_end` is the end of the leading run in which every segment is exact or computed behind exact tokens only.
    `budget` is how many B-rows a selector may choose: `ceil(recompute_ratio * B)` (architecture.md, Definitions).
    """

    layout: PromptLayout
    reuse: tuple[Reuse, ...]
    recompute_ratio: float
    exact_end: int

    @classmethod
    def of(cls, layout: PromptLayout, reuse: Sequence[Reuse], recompute_ratio: float) -> BlendPlan:
        """Build a plan; an EXACT segment behind a CACHED one is demoted to CACHED (its past is approximate here)."""
        if len(reuse) != len(layout.segments):
            raise ValueError(f"{len(reuse)} reuse marks for {len(layout.segments)} segments")
        if not 0.0 <= recompute_ratio <= 1.0:
            raise ValueError(f"recompute_ratio is {recompute_ratio}; it must lie in 0..1")
        marks: list[Reuse] = []
        exact_end, leading = 0, True
        for segment, mark in zip(layout.segments, reuse, strict=True):
            leading = leading and mark is not Reuse.CACHED
            if leading:
                exact_end = segment.end
            marks.append(Reuse.CACHED if mark is Reuse.EXACT and not leading else mark)
        return cls(layout, tuple(marks), recompute_ratio, exact_end)

    def spans(self, *kinds: Reuse) -> list[tuple[int, int]]:
        """Merged `(start, end)` spans of the segments reused in one of these ways, ascending."""
        out: list[tuple[int, int]] = []
        for segment, mark in zip(self.layout.segments, self.reuse, strict=True):
            if mark not in kinds:
                continue
            if out and out[-1][1] == segment.start:
                out[-1] = (out[-1][0], segment.end)
            else:
                out.append((segment.start, segment.end))
        return out

    def count(self, kind: Reuse) -> int:
        """Tokens reused in this way."""
        return sum(end - start for start, end in self.spans(kind))

    @property
    def budget(self) -> int:
        """How many B-rows may be recomputed; at least one where the ratio is above 0 and there are B-rows."""
        # the small slack keeps 0.15 * 100 at 15 although the product is 15.000000000000002
        return min(self.count(Reuse.CACHED), math.ceil(self.recompute_ratio * self.count(Reuse.CACHED) - 1e-9))
