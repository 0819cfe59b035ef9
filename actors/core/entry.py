"""What the scheduler knows of one job between two events."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from kvblend.actors.core.events import Hit, Job, PrefillReport
from kvblend.actors.core.kept import Origin
from kvblend.actors.core.lifecycle import TERMINAL_PHASES, Phase, check_transition
from kvblend.actors.core.planning import Decision
from kvblend.actors.core.progress import Progress
from kvblend.actors.messages import LoadingDecision, TokenLogprob, Usage
from kvblend.engine.layout import Reuse, SegmentKind
from kvblend.store.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class Continued:
    """The kept sequence that a prompt began with: how many of its tokens, the chunks among them, and whose KV it is.

    `turns` are the lengths of the prompts answered within these tokens. `job` is the one before it was laid out anew.
    """

    request_id: str
    tokens: int
    chunks: int
    origin: Origin
    turns: tuple[int, ...]
    job: Job


EndKind = Literal["cancelled", "deadline", "fault"]


@dataclass(slots=True)
class Entry:
    """One job.

    `pages` are reserved KV pages; `waits` are keys that other jobs are computing for it; `waits_for` is the request
    whose first token comes before it; `owns` are keys it computes itself, with their segments; `ending` is how it will
    end after the step it is in; `rounds` counts how often it waited for chunks; `distrusted`: stored KV was
    found wrong, and nothing stored is used for it any more; `shared`: its prompt was not computed alone.

    `arrival` and `turn` number arrivals and first admissions; `overtaken` and `skipped` count who and what passed it by
    (`ordering`). `progress` is how far its prompt has come on the device;
    `device_ms` and `decode_ms` are its share of the steps that its prompt and its answer were in. `continued` is what
    it began with, where it is the next turn of a conversation.
    """

    job: Job
    accepted_s: float
    phase: Phase = Phase.QUEUED
    pages: int = 0
    looking_up: bool = False
    stalled: bool = False
    in_step: bool = False
    loads: bool = False
    replans: int = 0
    ending: tuple[EndKind, str] | None = None
    replan: str = ""
    rounds: int = 0
    distrusted: bool = False
    waits: set[ChunkKey] = field(default_factory=set)
    waits_for: str | None = None
    owns: dict[ChunkKey, int] = field(default_factory=dict)
    stores_left: int = 0
    created: bool = False
    hits: tuple[Hit, ...] = ()
    decision: Decision | None = None
    prefill: PrefillReport | None = None
    output_tokens: int = 0
    silent_ids: tuple[int, ...] = ()
    silent_logprobs: tuple[TokenLogprob, ...] = ()
    admitted_s: float = 0.0
    first_token_s: float | None = None
    compute_ms: float = 0.0
    shared: bool = False
    arrival: int = 0
    turn: int = 0
    overtaken: int = 0
    skipped: int = 0
    device_ms: float = 0.0
    decode_ms: float = 0.0
    progress: Progress = field(default_factory=Progress)
    output_ids: list[int] = field(default_factory=list)
    continued: Continued | None = None
    loading: LoadingDecision = field(default_factory=LoadingDecision)
    notes: list[str] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The job's id."""
        return self.job.request_id

    def move(self, phase: Phase) -> None:
        """Change the phase. Raises IllegalTransition."""
        check_transition(self.request_id, self.phase, phase)
        self.phase = phase

    @property
    def deadline_s(self) -> float:
        """When it must have ended, infinite where no deadline was given."""
        limit = self.job.deadline_ms
        return math.inf if limit is None else self.accepted_s + limit / 1e3

    @property
    def eligible(self) -> bool:
        """Whether it may be admitted as soon as there is room."""
        waits = self.looking_up or self.waits or self.waits_for is not None
        return self.phase is Phase.QUEUED and not self.pages and not waits

    @property
    def ended(self) -> bool:
        """Whether the terminal event is out."""
        return self.phase in TERMINAL_PHASES

    def usage(self, now_s: float) -> Usage:
        """The figures so far."""
        layout = self.job.layout
        # a chunk that was not looked up (full mode) is no miss
        chunks = {index for index, _ in layout.chunks() if self.job.keys[index].lookup}
        usage = Usage(mode=self.job.mode, prompt_tokens=layout.num_tokens, output_tokens=self.output_tokens)
        if self.decision is None:
            return replace(usage, tokens_fresh=layout.num_tokens, total_ms=1e3 * (now_s - self.accepted_s))
        plan = self.decision.plan
        hit_chunks = sum(hit.segment in chunks for hit in self.hits)
        tiers: dict[str, int] = {}
        for hit in self.hits:
            tiers[hit.tier] = tiers.get(hit.tier, 0) + 1
        tier_tokens: dict[str, int] = {}
        for hit in self.hits:
            if hit.segment in self.decision.used:
                length = len(layout.segments[hit.segment].token_ids)
                tier_tokens[hit.tier] = tier_tokens.get(hit.tier, 0) + length
        fresh, budget = plan.count(Reuse.FRESH), plan.budget
        usage = replace(
            usage,
            chunk_hits=hit_chunks,
            chunk_misses=len(chunks) - hit_chunks,
            tokens_reused=layout.num_tokens - fresh - budget,
            tokens_recomputed=budget,
            tokens_fresh=fresh,
            recompute_ratio=plan.recompute_ratio,
            ttft_ms=1e3 * (self.first_token_s - self.accepted_s) if self.first_token_s is not None else 0.0,
            total_ms=1e3 * (now_s - self.accepted_s),
            queue_ms=1e3 * (self.admitted_s - self.accepted_s),
            compute_ms=self.compute_ms,
            tiers=tiers,
            tier_tokens=tier_tokens,
            loading=self.loading,
            notes=(*self._given_notes(), *self.decision.notes, *self.notes),
        )
        if self.continued is not None:
            count, tokens = self.continued.chunks, self.continued.tokens
            usage = replace(
                usage, chunk_hits=count, chunk_misses=0, tiers={"device": count}, tier_tokens={"device": tokens}
            )
        done = self.prefill
        if done is None:
            return usage
        return replace(
            usage,
            tokens_reused=done.tokens_reused,
            tokens_recomputed=done.tokens_recomputed,
            tokens_fresh=done.tokens_fresh,
            charged_ratio=done.charged_ratio,
            load_ms=done.load_ms,
            recompute_ratio=usage.recompute_ratio if done.recompute_ratio is None else done.recompute_ratio,
            kl_estimate=done.kl_estimate,
            notes=(*usage.notes, *self._raise_notes(done)),
        )

    def _raise_notes(self, done: PrefillReport) -> tuple[str, ...]:
        if not done.ratios_tried or done.recompute_ratio is None:
            return ()
        steps = " to ".join(f"{ratio:g}" for ratio in (*done.ratios_tried, done.recompute_ratio))
        return (f"max_kl {self.job.options.max_kl:g}: recompute_ratio was raised from {steps}",)

    def _given_notes(self) -> tuple[str, ...]:
        return (self.job.note,) if self.job.note and self.job.kind == "generate" else ()

    def last_chunk_tokens(self) -> int:
        """Tokens of a precompute job's chunk."""
        last = self.job.layout.segments[-1]
        return len(last.token_ids) if last.kind is SegmentKind.CHUNK else 0
