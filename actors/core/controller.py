"""The loading controller: what is loaded, what is computed instead, and how much more loading hides anyway.

Its model is a pipeline. Layer k can be computed when it is loaded and layer k - 1 is computed; all loaded bytes come at
the throughput that was measured, layer after layer. Wherever an estimate could be wrong it is taken so that the plain
way (the request's own ratio, everything loaded) wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvblend.actors.core.events import BlendShape, Hit, Job
from kvblend.actors.core.speeds import ComputeMeter, TierSpeed
from kvblend.actors.messages import LoadingDecision
from kvblend.engine.layout import BlendPlan, Reuse, SegmentKind

MARGIN = 0.15
"""Computing may turn out this much slower than estimated, and loading this much faster."""
LATER_MAX = 0.01
"""A raised ratio may delay the first token by this share: the last layer's extra rows are hidden behind nothing."""
LAST_LAYER = 0.25
"""Behind the last layer's keys and values only the last row goes on: its share of a layer's work, rounded up."""
GAIN_S_MIN = 0.02
"""Computing in place of loading must gain at least this much."""
SPEED_AGE_S_MAX = 60.0
"""What was measured longer ago is not known any more; so a tier that was slow once is tried again."""
TIERS_BY_PRICE = ("disk", "remote", "host")
"""Where a chunk may lie, the cheapest byte first."""


@dataclass(frozen=True, slots=True)
class Work:
    """One way to answer a prompt: rows to compute, seconds to load, with `row_s` seconds per row through all layers.

    `cached` rows come from the store, of which `ratio` are computed again; `fresh` ones are computed.
    """

    shape: BlendShape
    num_layers: int
    row_s: float
    cached: int
    fresh: int
    ratio: float
    load_s: float

    def layers_s(self) -> list[float]:
        """Seconds of computing, layer by layer, of the pass that can go on while layers arrive."""
        full = 0 if self.shape.waits else self.shape.full_layers
        rows = [self.fresh + self.cached * (1.0 if k < full else self.ratio) for k in range(self.num_layers)]
        if self.shape.waits:
            rows = [float(self.fresh)] * self.num_layers
        rows[-1] *= LAST_LAYER
        return [count * self.row_s / self.num_layers for count in rows]

    @property
    def after_s(self) -> float:
        """Seconds of computing that begin when all layers are there and were looked at."""
        return (self.fresh + self.cached * self.ratio) * self.row_s if self.shape.waits else 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of computing in all."""
        return sum(self.layers_s()) + self.after_s

    def first_token_s(self) -> float:
        """Seconds from the start of loading to the first token."""
        now = 0.0
        for layer, seconds in enumerate(self.layers_s(), start=1):
            now = max(now, self.load_s * layer / self.num_layers) + seconds
        return now + self.after_s


@dataclass(frozen=True, slots=True)
class Choice:
    """What the controller makes of a request: its ratio, and the segments that are computed though they are stored."""

    ratio: float
    computed: frozenset[int]
    decision: LoadingDecision
    notes: tuple[str, ...] = ()


class Controller:
    """Decides per request, from speeds that are measured while the server runs. Unknown speeds decide nothing."""

    def __init__(self, num_layers: int, *, may_compute: bool = True) -> None:
        """`may_compute` False: what is stored is always loaded."""
        self.num_layers = num_layers
        self.compute = ComputeMeter()
        self.speeds: dict[str, TierSpeed] = {}
        self._may_compute = may_compute

    def choose(self, job: Job, hits: Sequence[Hit], speeds: Mapping[str, TierSpeed], at_s: float, busy: int) -> Choice:
        """The way to answer `job` with the hits that it uses; `busy` sequences share the device, its own included."""
        self.speeds.update(speeds)
        floor = job.recompute_ratio if job.mode == "blend" else 0.0
        plain = LoadingDecision(job.shape.auto_ratio and job.mode == "blend", floor)
        row_s = self.compute.blend_row_s or self.compute.row_s
        loading = [hit for hit in hits if hit.num_bytes]
        if row_s is None or not loading or job.kind != "generate":
            return Choice(floor, frozenset(), plain)
        known = self._known(at_s)
        load_s = estimate_load_s(loading, known)
        work = self._work(job, hits, floor, load_s, row_s * max(1, busy))
        computed = self._computed_instead(job, hits, work, known)
        if computed:
            left = [hit for hit in hits if hit.segment not in computed]
            work = self._work(job, left, floor, estimate_load_s(left, known), work.row_s)
        ratio = raise_ratio(work) if plain.ratio_auto else floor
        decision = replace(
            plain,
            load_ms=1e3 * work.load_s,
            compute_ms=1e3 * replace(work, ratio=ratio).compute_s,
            chunks_computed=len(computed),
        )
        notes = []
        if computed:
            notes.append(f"{len(computed)} stored segments were computed: that is faster than loading them")
        if ratio > floor:
            notes.append(f"recompute_ratio {floor:g} raised to {ratio:g}: loading hides it")
        return Choice(ratio, computed, decision, tuple(notes))

    def tier_for(self, tokens: int, num_bytes: int, floor: float, at_s: float) -> str:
        """The cheapest tier from which a chunk of this size loads no slower than its share of a blend is computed.

        Host memory where none does, "" where the speed of computing is not known.
        """
        row_s = self.compute.blend_row_s
        if row_s is None:
            return ""
        hidden_s, known = floor * tokens * row_s * (1.0 - MARGIN), self._known(at_s)
        for tier in TIERS_BY_PRICE:
            if tier == "host" or (tier in known and known[tier].load_s(num_bytes) <= hidden_s):
                return tier
        return "host"

    def cost_s(self, tokens: int) -> float:
        """Seconds that computing a chunk of this many tokens takes; 0 where that is not known."""
        return tokens * (self.compute.row_s or 0.0)

    def _known(self, at_s: float) -> dict[str, TierSpeed]:
        return {tier: speed for tier, speed in self.speeds.items() if at_s - speed.at_s <= SPEED_AGE_S_MAX}

    def _work(self, job: Job, hits: Iterable[Hit], ratio: float, load_s: float, row_s: float) -> Work:
        marks = [Reuse.FRESH] * len(job.layout.segments)
        for hit in hits:
            marks[hit.segment] = Reuse.EXACT if hit.exact else Reuse.CACHED
        plan = BlendPlan.of(job.layout, marks, ratio)
        cached, fresh = plan.count(Reuse.CACHED), plan.count(Reuse.FRESH)
        return Work(job.shape, self.num_layers, row_s, cached, fresh, ratio, load_s)

    def _computed_instead(
        self, job: Job, hits: Sequence[Hit], work: Work, known: Mapping[str, TierSpeed]
    ) -> frozenset[int]:
        """Chunks whose loading takes longer than their computing, the worst first, as long as each brings something."""
        if not self._may_compute or job.mode == "full":
            return frozenset()
        segments, left, chosen = job.layout.segments, list(hits), set[int]()
        whole_s = job.layout.num_tokens * work.row_s
        best_s = work.first_token_s()
        passes = 2 if job.shape.waits else 1

        def slowness(hit: Hit) -> float:
            fresh_s = passes * len(segments[hit.segment].token_ids) * work.row_s * (1.0 + MARGIN)
            speed = known.get(hit.tier)
            return 0.0 if speed is None else (1.0 - MARGIN) * hit.num_bytes / speed.bytes_per_s / fresh_s

        chunks = [hit for hit in hits if hit.num_bytes and segments[hit.segment].kind is SegmentKind.CHUNK]
        for hit in sorted(chunks, key=slowness, reverse=True):
            if slowness(hit) <= 1.0:
                break
            fewer = [other for other in left if other is not hit]
            then = self._work(job, fewer, work.ratio, estimate_load_s(fewer, known), work.row_s)
            gain_s = best_s - then.first_token_s()
            if gain_s < max(GAIN_S_MIN, MARGIN * best_s / len(chunks)) or then.compute_s > whole_s:
                continue
            chosen.add(hit.segment)
            left, best_s = fewer, then.first_token_s()
        return frozenset(chosen)


def estimate_load_s(hits: Iterable[Hit], speeds: Mapping[str, TierSpeed]) -> float:
    """Seconds until all bytes of the hits are there, each tier at its own speed at the same time. Unknown ones: 0."""
    by_tier: dict[str, int] = {}
    for hit in hits:
        by_tier[hit.tier] = by_tier.get(hit.tier, 0) + hit.num_bytes
    return max((speeds[tier].load_s(count) for tier, count in by_tier.items() if tier in speeds), default=0.0)


def raise_ratio(work: Work) -> float:
    """The largest ratio, in hundredths, that delays the first token by no more than `LATER_MAX`; at least the work's.

    Loading is taken `MARGIN` faster than it was, and computing slower, so that what is measured later stays below too.
    """
    if work.shape.waits or not work.cached:
        return work.ratio
    fast = replace(work, load_s=work.load_s * (1.0 - MARGIN))
    limit = fast.first_token_s() * (1.0 + LATER_MAX)
    slow = replace(fast, row_s=fast.row_s * (1.0 + MARGIN))
    low, high = int(100 * work.ratio), 100
    while low < high:
        middle = (low + high + 1) // 2
        if replace(slow, ratio=middle / 100).first_token_s() <= limit:
            low = middle
        else:
            high = middle - 1
    return max(work.ratio, low / 100)
