"""The next turn of a conversation: finished sequences stay on the device, and a prompt that goes on begins with one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvblend.actors.core import events as ev
from kvblend.actors.core.entry import Continued, Entry
from kvblend.actors.core.kept import LOOSE_TOKENS, Kept, KeptSequences, Origin
from kvblend.actors.core.planning import Decision
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind

if TYPE_CHECKING:
    from kvblend.actors.core.scheduler import SchedulerState


class Continuing:
    """Keeps the KV of finished answers in pages that nobody else needs, and finds what a prompt goes on from."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.kept = KeptSequences(state.limits.kept_pages_max)

    def offer(self, entry: Entry, out: list[ev.SchedulerCommand]) -> bool:
        """Keep the sequence of a finished answer. True where its slots are not to be freed; its pages stay taken."""
        kept = _kept(entry)
        if kept is None:
            return False
        gone = self.kept.keep(kept)
        for other in gone:
            if other is not kept:
                self._free(other, out)
        if kept in gone:
            return False
        self._state.pages_used += kept.pages
        return True

    def make_room(self, pages: int, out: list[ev.SchedulerCommand]) -> None:
        """Free kept sequences until `pages` are free, or none is left."""
        while self.kept.pages and self._state.limits.pages - self._state.pages_used < pages:
            self._free(self.kept.drop_oldest(), out)

    def forget(self) -> None:
        """The device has lost them all."""
        while self.kept.pages:
            self._state.pages_used -= self.kept.drop_oldest().pages

    def begin(self, entry: Entry) -> Decision | None:
        """The plan of a prompt that goes on from a kept sequence; `entry.job` is laid out anew. None: it does not."""
        job = entry.job
        # what bounds the KL of one question says nothing of the next
        if job.kind != "generate" or job.mode == "full" or entry.replans or job.options.max_kl is not None:
            return None
        exact = Origin(job.salt, job.regime)
        origins = (exact,) if job.mode == "prefix" else (exact, _asked(entry))
        ids = job.layout.token_ids
        found = self.kept.find(origins, ids)
        chunks = [segment for _, segment in job.layout.chunks()]
        if found is None or any(segment.end > found[1] for segment in chunks):
            return None
        kept, tokens = found
        if tokens < _exact_tokens(entry):
            return None  # what is stored and exact here goes further
        layout = PromptLayout.of([(SegmentKind.CHUNK, ids[:tokens]), (SegmentKind.QUESTION, ids[tokens:])])
        entry.job = replace(job, layout=layout, keys=(ev.SegmentKeys(), ev.SegmentKeys()))
        turns = tuple(turn for turn in kept.turns if turn <= tokens + LOOSE_TOKENS)
        entry.continued = Continued(kept.request_id, tokens, len(chunks), kept.origin, turns, job)
        entry.hits = ()
        how = "exact" if kept.origin.blend is None else "as it was blended"
        note = f"the next turn of a conversation: the KV of its first {tokens} tokens was kept, {how}"
        plan = BlendPlan.of(layout, [Reuse.EXACT, Reuse.FRESH], 0.0)
        return Decision(plan, (), (), (), (note,))

    def undo(self, entry: Entry, out: list[ev.SchedulerCommand]) -> None:
        """Have a prompt that was to go on from a kept sequence begin with nothing: the device lost that one."""
        if entry.continued is None:
            return
        entry.job = entry.continued.job
        if entry.continued.request_id in {kept.request_id for kept in self.kept}:
            self._free(self.kept.drop(entry.continued.request_id), out)
        entry.continued = None

    def _free(self, kept: Kept, out: list[ev.SchedulerCommand]) -> None:
        self._state.pages_used -= kept.pages
        out.append(ev.FreeSequence(kept.request_id))


def _asked(entry: Entry) -> Origin:
    return Origin(entry.job.salt, entry.job.regime, (entry.job.recompute_ratio, entry.job.options))


def _kept(entry: Entry) -> Kept | None:
    job = entry.job
    if job.kind != "generate" or entry.decision is None or entry.prefill is None or not entry.output_ids:
        return None
    origin = _asked(entry)
    turns: tuple[int, ...] = (job.layout.num_tokens,)
    if entry.continued is not None:
        origin, turns = entry.continued.origin, (*entry.continued.turns, *turns)
    elif not entry.decision.plan.count(Reuse.CACHED):
        origin = replace(origin, blend=None)
    # nobody asks for the ratio that load pressed it to, and a bound for one question is none for the next
    if origin.blend is not None and (entry.loading.ratio_lowered_from is not None or job.options.max_kl is not None):
        return None
    # the last token was sampled and never computed
    ids = (*job.layout.token_ids, *entry.output_ids[:-1])
    return Kept(entry.request_id, ids, turns, origin, entry.pages)


def _exact_tokens(entry: Entry) -> int:
    """How far the leading run of exact hits reaches."""
    exact, end = {hit.segment for hit in entry.hits if hit.exact}, 0
    for index, segment in enumerate(entry.job.layout.segments):
        if index not in exact:
            return end
        end = segment.end
    return end
