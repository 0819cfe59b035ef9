"""How jobs get in: room, look-up, plan, and whom they wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvblend.actors.core import events as ev
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.core.planning import Decision, decide, precompute_job
from kvblend.actors.messages import Planned
from kvblend.store.keys import ChunkKey

if TYPE_CHECKING:
    from kvblend.actors.core.scheduler import SchedulerState

REPLANS_MAX = 3
WAIT_ROUNDS_MAX = 4


class Admission:
    """First come first served: nobody overtakes a job that needs room, but a job that waits for a chunk is passed."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def submitted(self, event: ev.Submitted, out: list[ev.SchedulerCommand]) -> None:
        """Take a job in; one that could never be admitted would keep all others waiting and fails at once."""
        job, limits = event.job, self._state.limits
        if job.request_id in self._state.entries:
            return  # the system refuses ids that are in use: overwritten, the first job would never end
        entry = self._state.entries[job.request_id] = Entry(job, event.at_s)
        need = limits.pages_of(job.tokens_max)
        if need > limits.pages:
            text = f"it needs {need} KV pages of {limits.page_tokens} tokens; there are {limits.pages} in all"
            self._state.endings.fail(entry, "too_large", text, out)

    def admit(self, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        """Reserve pages for whoever fits and ask the loader what is stored of them."""
        state = self._state
        count = sum(1 for _ in state.running())
        # a slow disk must not gather captured chunks in memory
        busy_disk = state.writes >= state.limits.max_num_seqs
        for entry in list(state.entries.values()):
            if not entry.eligible or (busy_disk and entry.job.kind == "precompute"):
                continue
            need = state.limits.pages_of(entry.job.tokens_max)
            if count >= state.limits.max_num_seqs or state.pages_used + need > state.limits.pages:
                self._look_ahead(out)
                return
            count += 1
            entry.pages = need
            state.pages_used += need
            entry.admitted_s = at_s
            entry.looking_up, entry.ahead = True, False
            out.append(ev.Lookup(entry.job, entry.deadline_s))

    def _look_ahead(self, out: list[ev.SchedulerCommand]) -> None:
        """Have the loader look at the next requests in the queue, each once while it waits."""
        left = self._state.limits.lookahead_requests_max
        for entry in self._state.entries.values():
            if left <= 0:
                return
            if entry.job.kind == "generate" and entry.eligible:
                left -= 1
                if not entry.ahead:
                    entry.ahead = True
                    out.append(ev.LookAhead(entry.job, entry.deadline_s))

    def looked_up(self, event: ev.LookedUp, out: list[ev.SchedulerCommand]) -> None:
        """Plan with the hits; or wait, where another job is computing what is missing."""
        state = self._state
        entry = state.entries.get(event.request_id)
        if entry is None or not entry.looking_up:
            return
        entry.looking_up = False
        entry.hits = () if entry.distrusted or entry.replans > REPLANS_MAX else event.hits
        last = len(entry.job.layout.segments) - 1
        if entry.job.kind == "precompute" and any(hit.segment == last for hit in entry.hits):
            state.endings.finish(entry, "stop", event.at_s, out)
            return
        decision = self._decide(entry, event)
        entry.waits = self._busy_keys(entry, decision, event.at_s)
        if entry.waits:
            entry.rounds += 1
            self._back_to_queue(entry, out)
        else:
            self._begin(entry, decision, event.at_s, out)

    def _decide(self, entry: Entry, event: ev.LookedUp) -> Decision:
        """The plan, as the loading controller would have it."""
        state, job = self._state, entry.job
        decision = decide(job, entry.hits, state.limits.blend_min_tokens)
        used = [hit for hit in entry.hits if hit.segment in decision.used]
        busy = sum(1 for _ in state.running())
        choice = state.controller.choose(job, used, event.speeds, event.at_s, busy)
        entry.loading = choice.decision
        if choice.computed or choice.ratio != decision.plan.recompute_ratio:
            decision = decide(job, entry.hits, state.limits.blend_min_tokens, choice.ratio, choice.computed)
        return replace(decision, notes=(*decision.notes, *choice.notes))

    def _busy_keys(self, entry: Entry, decision: Decision, at_s: float) -> set[ChunkKey]:
        """What is missing and being computed by others; with `on_miss` "precompute" every missed chunk is."""
        inflight, wanted = self._state.inflight, _keys_wanted(entry, decision)
        busy = {key for key in wanted if inflight.get(key, entry.request_id) != entry.request_id}
        # nobody waits for ever where chunks are computed and lost again (a full disk, a tiny pool); but a job that is
        # there to store one chunk has nothing else to do, and owns nothing that others could wait for meanwhile
        if entry.replans or entry.rounds >= WAIT_ROUNDS_MAX:
            return busy & {entry.job.keys[-1].keep} if entry.job.kind == "precompute" else set()
        if entry.job.on_miss == "precompute" and entry.job.kind == "generate":
            busy |= self._queue_precomputes(entry, decision.precomputes, at_s)
        return busy

    def load_failed(self, event: ev.LoadFailed, out: list[ev.SchedulerCommand]) -> None:
        """A leased chunk is damaged: plan again without it. Before the first token nobody notices."""
        entry = self._state.entries.get(event.request_id)
        if entry is None or entry.phase not in (Phase.LOADING, Phase.PREFILLING) or not entry.loads:
            return
        entry.replan = event.reason
        if entry.in_step:
            out.append(ev.FlagCancelled(entry.request_id))
        else:
            self.plan_again(entry, out)

    def plan_again(self, entry: Entry, out: list[ev.SchedulerCommand]) -> None:
        """Free everything and start over; after some tries without any reuse."""
        entry.notes.append(f"planned again: {entry.replan}")
        entry.replan, entry.stalled, entry.loads, entry.decision = "", False, False, None
        entry.replans += 1
        self._state.endings.disown(entry)
        out.append(ev.FreeSequence(entry.request_id))
        self._back_to_queue(entry, out)

    def _begin(self, entry: Entry, decision: Decision, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        inflight, keys = self._state.inflight, entry.job.keys
        free = [i for i in decision.captures if inflight.get(_kept(keys[i]), entry.request_id) == entry.request_id]
        if entry.job.kind == "generate" and self._state.writes >= 2 * self._state.limits.max_num_seqs:
            free = []
        entry.decision = decision = replace(decision, captures=tuple(free))
        for segment in decision.captures:
            entry.owns[_kept(keys[segment])] = segment
            inflight[_kept(keys[segment])] = entry.request_id
        entry.move(Phase.LOADING)
        if entry.job.kind == "generate":
            self._queue_precomputes(entry, decision.precomputes, at_s)
            out.append(ev.Emit(entry.request_id, Planned(entry.request_id, entry.usage(at_s))))
        entry.loads = bool(decision.used)
        out.append(ev.StartSequence(entry.job, decision.plan, decision.captures))
        out.append(ev.StartLoading(entry.request_id, decision.used))
        if not entry.loads:
            entry.move(Phase.PREFILLING)

    def _queue_precomputes(self, entry: Entry, segments: tuple[int, ...], at_s: float) -> set[ChunkKey]:
        """Queue a job for every missed chunk that nobody computes yet; returns the keys of all of them."""
        state, keys = self._state, set()
        for segment in segments:
            key = entry.job.keys[segment].precompute
            if key is None or key in keys:
                continue
            keys.add(key)
            if key in state.inflight:
                continue
            job = precompute_job(f"/precompute/{state.new_number()}", entry.job, segment, state.limits.conditioning)
            waiting = Entry(job, at_s)
            waiting.owns[key] = len(job.layout.segments) - 1
            # with "fresh" the answer comes first; the job starts when the first token is out
            waiting.waits_for = entry.request_id if entry.job.on_miss == "fresh" else None
            state.inflight[key] = job.request_id
            state.entries[job.request_id] = waiting
        return keys

    def _back_to_queue(self, entry: Entry, out: list[ev.SchedulerCommand]) -> None:
        entry.ahead = False
        out.append(ev.Release(entry.request_id))
        self._state.return_pages(entry)
        if entry.phase is not Phase.QUEUED:
            entry.move(Phase.QUEUED)


def _kept(keys: ev.SegmentKeys) -> ChunkKey:
    if keys.keep is None:
        raise ValueError("a captured segment has no key to be stored under")
    return keys.keep


def _keys_wanted(entry: Entry, decision: Decision) -> set[ChunkKey]:
    keys = entry.job.keys
    wanted = {keys[i].keep for i in decision.captures} | {keys[i].precompute for i in decision.precomputes}
    return {key for key in wanted if key is not None}
