"""How jobs get in: room, look-up, plan, and whom they wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvblend.actors.core import events as ev
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.forecast import MARGIN
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.core.planning import Decision, decide, precompute_job
from kvblend.actors.core.progress import Progress
from kvblend.actors.messages import Planned
from kvblend.store.keys import ChunkKey

if TYPE_CHECKING:
    from kvblend.actors.core.scheduler import SchedulerState

REPLANS_MAX = 3
WAIT_ROUNDS_MAX = 4


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job is not taken now, and after how many seconds it might be."""

    message: str
    retry_after_s: float


class Admission:
    """In the order of `ordering`: nobody passes the next one because it needs more room, but whoever waits for a chunk
    is passed. `ahead` are the ids of waiting requests that the loader looks at already.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.ahead: set[str] = set()

    def submitted(self, event: ev.Submitted, out: list[ev.SchedulerCommand]) -> None:
        """Take a job in; one that could never be admitted would keep all others waiting and fails at once."""
        job, limits = event.job, self._state.limits
        if job.request_id in self._state.entries:
            return  # the system refuses ids that are in use: overwritten, the first job would never end
        late = self.refusal(job, event.at_s)
        entry = self._state.entries[job.request_id] = Entry(job, event.at_s)
        self._state.ordering.arrive(entry)
        need = limits.pages_of(job.tokens_max)
        if need > limits.pages:
            text = f"it needs {need} KV pages of {limits.page_tokens} tokens; there are {limits.pages} in all"
            self._state.endings.fail(entry, "too_large", text, out)
        elif late is not None:
            self._state.endings.fail(entry, "overloaded", late.message, out)

    def refusal(self, job: ev.Job, at_s: float) -> Refusal | None:
        """Why a job that comes now would be refused: its deadline will pass before its last token. Else None."""
        if job.deadline_ms is None or job.kind != "generate":
            return None
        state, left_s = self._state, job.deadline_ms / 1e3
        waiting = [e for e in state.entries.values() if e.job.kind == "generate" and e.phase is Phase.QUEUED]
        queued = [entry for entry in waiting if not entry.pages]
        ahead = state.ordering.ahead_of(Entry(job, at_s), queued, at_s)
        if not ahead and not state.num_running:
            return None  # nothing else teaches a server, refused by an old figure, that it could do it
        first_s = state.forecast.first_token_s(job, state.running(), ahead)
        if first_s is None:
            return None
        # what decoding takes alone: prompts that are beside it now are in the first token's time already
        step_s = 1e-3 * state.pace.decode_ms(min(state.limits.max_num_seqs, state.num_running + 1))
        last_s = first_s + state.forecast.going_on_s(job, step_s)
        if last_s * (1.0 - MARGIN) <= left_s:
            return None
        what = f"the first token is expected in {1e3 * first_s:.0f} ms"
        if first_s * (1.0 - MARGIN) <= left_s:
            what = f"the last token is expected in {1e3 * last_s:.0f} ms"
        text = f"deadline_ms is {job.deadline_ms:g}; {what}, behind {len(ahead)} waiting requests"
        return Refusal(text, last_s - left_s)

    def admit(self, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        """Reserve pages for whoever fits and ask the loader what is stored of them."""
        state, limits = self._state, self._state.limits
        places = limits.max_num_seqs - state.num_running
        if places <= 0 and len(self.ahead) >= limits.lookahead_requests_max:
            return
        waiting = [entry for entry in state.entries.values() if entry.eligible]
        if waiting and state.writes >= limits.max_num_seqs:
            # a slow disk must not gather captured chunks in memory
            waiting = [entry for entry in waiting if entry.job.kind != "precompute"]
        if not waiting:
            return
        wanted = {key for entry in state.entries.values() if entry.job.kind == "generate" for key in entry.waits}
        while waiting:
            free = limits.pages - state.pages_used + state.continuing.kept.pages
            if places <= 0 or all(limits.pages_of(entry.job.tokens_max) > free for entry in waiting):
                break
            entry = state.ordering.first(waiting, wanted, at_s)
            need = limits.pages_of(entry.job.tokens_max)
            if need > free:
                break
            places -= 1
            waiting.remove(entry)
            state.ordering.admit(entry, waiting, self._clients)
            state.continuing.make_room(need, out)
            state.reserve_pages(entry, need)
            entry.admitted_s = at_s
            entry.looking_up = True
            self.ahead.discard(entry.request_id)
            out.append(ev.Lookup(entry.job, entry.deadline_s))
        self._look_ahead(waiting, at_s, out)

    def _clients(self) -> set[str]:
        return {entry.job.client for entry in self._state.entries.values()}

    def _look_ahead(self, waiting: list[Entry], at_s: float, out: list[ev.SchedulerCommand]) -> None:
        """Have the loader look at the next requests in the queue, each once while it waits."""
        answers = [entry for entry in waiting if entry.job.kind == "generate"]
        count = self._state.limits.lookahead_requests_max
        left = count - len(self.ahead)
        if left <= 0 or not answers:
            return
        for entry in self._state.ordering.first_of(answers, count, at_s):
            if left and entry.request_id not in self.ahead:
                left -= 1
                self.ahead.add(entry.request_id)
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
        begun = state.continuing.begin(entry)
        if begun is not None:
            self._begin(entry, begun, event.at_s, out)
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
        busy = state.num_running
        choice = state.controller.choose(job, used, event.speeds, event.at_s, busy)
        entry.loading = choice.decision
        state.lever.note(self._answers_waiting(), busy)
        ratio = state.lever.lower(job, choice.ratio)
        if choice.computed or ratio != decision.plan.recompute_ratio:
            decision = decide(job, entry.hits, state.limits.blend_min_tokens, ratio, choice.computed)
        notes = [*decision.notes, *choice.notes]
        if ratio < choice.ratio and decision.plan.budget:
            entry.loading = replace(entry.loading, ratio_lowered_from=choice.ratio)
            notes.append(f"recompute_ratio {choice.ratio:g} lowered to {ratio:g}: the server is loaded")
        return replace(decision, notes=tuple(notes))

    def _answers_waiting(self) -> int:
        return sum(entry.eligible and entry.job.kind == "generate" for entry in self._state.entries.values())

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
        entry.progress, entry.device_ms, entry.continued = Progress(), 0.0, None
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
        if entry.loads:
            self._state.forecast.note_load(entry.job, entry.loading.load_ms / 1e3)
        earlier = None if entry.continued is None else (entry.continued.request_id, entry.continued.tokens)
        out.append(ev.StartSequence(entry.job, decision.plan, decision.captures, earlier))
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
            state.ordering.arrive(waiting)
            waiting.owns[key] = len(job.layout.segments) - 1
            # with "fresh" the answer comes first; the job starts when the first token is out
            waiting.waits_for = entry.request_id if entry.job.on_miss == "fresh" else None
            state.inflight[key] = job.request_id
            state.entries[job.request_id] = waiting
        return keys

    def _back_to_queue(self, entry: Entry, out: list[ev.SchedulerCommand]) -> None:
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
