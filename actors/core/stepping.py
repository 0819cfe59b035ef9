"""Steps: who computes how many rows next, and what a finished step means for each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvblend.actors.core import events as ev
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.messages import Delta
from kvblend.engine.layout import Reuse
from kvblend.store.keys import ChunkKey

if TYPE_CHECKING:
    from kvblend.actors.core.scheduler import SchedulerState

# float32 kernels of different shapes differ by about 1e-6; bfloat16 storage by 4e-3. A wrong position or model: ~1
PARITY_ERROR_MAX = 0.02


class Stepping:
    """Plans one step at a time: every decoding sequence's row, and what there is room for of the prefills."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._asked: dict[str, int | None] = {}

    def plan_step(self, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        """Ask for the next step unless one is running or nothing is due.

        A chunk that is computed for later stands back while prompts of answers are due, but for every ninth step.
        """
        state = self._state
        if state.step is not None:
            return
        ready = [entry for entry in state.running() if not entry.stalled]
        decoding = [entry for entry in ready if entry.phase is Phase.DECODING]
        prefilling = [entry for entry in ready if entry.phase is Phase.PREFILLING and entry.prefill is None]
        if not decoding and not prefilling:
            # the device has nothing else to do: one request's rows are projected while its first layer is loading
            prefilling = state.ordering.sort_prefills([e for e in ready if e.phase is Phase.LOADING], at_s)[:1]
        items = [ev.StepItem(entry.request_id, 1) for entry in decoding]
        answers = any(entry.job.kind == "generate" for entry in prefilling)
        bounded = bool(decoding) or (not answers and any(e.job.kind == "generate" for e in state.running()))
        room = state.pace.room(len(decoding), state.limits.max_num_batched_tokens, bounded)
        for entry in state.ordering.sort_prefills(prefilling, at_s):
            stands_back = answers and entry.job.kind == "precompute" and state.ordering.may_stand_back(entry)
            item = None if stands_back else state.pace.cut(entry, room)
            entry.skipped = entry.skipped + 1 if item is None else 0
            if item is not None:
                items.append(item)
        if not items:
            return
        self._asked = {item.request_id: item.layers_max for item in items}
        state.step, state.step_number = tuple(item.request_id for item in items), state.new_number()
        for request_id in state.step:
            state.entries[request_id].in_step = True
        out.append(ev.RunStep(state.step_number, tuple(items)))

    def step_done(self, event: ev.StepDone, out: list[ev.SchedulerCommand]) -> None:
        """Take every item's result; cancels and re-plans that came meanwhile are carried out now."""
        state = self._state
        if state.step is None or event.number != state.step_number:
            self._drop_captured(event, out)
            return
        members, state.step = state.step, None
        for request_id in members:
            if request_id in state.entries:
                state.entries[request_id].in_step = False
        self._account(event)
        for result in event.results:
            entry = state.entries.get(result.request_id)
            if entry is None:
                continue  # not asked for: nothing of it is left
            entry.compute_ms += event.compute_ms
            entry.shared = entry.shared or len(members) > 1
            if entry.ending is not None:
                state.endings.end_early(entry, event.at_s, out)
            elif result.prefill is not None and result.prefill.parity_error > PARITY_ERROR_MAX:
                # before a failure, which wrong keys may well have caused
                self._distrust(entry, result.prefill.parity_error, out)
            elif result.status == "failed":
                state.endings.fail(entry, "internal", result.error, out)
            elif result.status == "lost":
                entry.replan = "the KV of its earlier turn is not on the device any more"
                state.continuing.undo(entry, out)
                state.admission.plan_again(entry, out)
            elif entry.replan and result.status not in ("sampled", "prefilled"):
                state.admission.plan_again(entry, out)
            elif result.status == "cancelled":
                state.endings.fail(entry, "internal", "the device left it, though nobody had asked for that", out)
            else:
                self._advance(entry, result, event.at_s, out)
        for request_id in set(members) - {result.request_id for result in event.results}:
            if request_id in state.entries:
                state.endings.fail(state.entries[request_id], "internal", "the device knows nothing of it", out)

    def _account(self, event: ev.StepDone) -> None:
        """Whose time it was, and how far everybody has come: what decoding takes alone is its, the rest is by rows."""
        state, decoding, prefills = self._state, list[Entry](), list[tuple[Entry, ev.ItemResult]]()
        for result in event.results:
            entry = state.entries.get(result.request_id)
            if entry is not None and entry.phase is Phase.DECODING:
                decoding.append(entry)
            elif entry is not None and entry.prefill is None:
                prefills.append((entry, result))
                entry.progress.note(result, self._asked.get(result.request_id), state.limits.num_layers)
        state.pace.note(len(decoding), prefills, event.compute_ms)
        if decoding:
            state.forecast.note_step(1e-3 * event.compute_ms)
        work = sum(result.row_layers for _, result in prefills)
        answers_ms = min(event.compute_ms, state.pace.decode_ms(len(decoding))) if prefills else event.compute_ms
        for entry in decoding:
            entry.decode_ms += answers_ms / len(decoding)
        for entry, result in prefills:
            share = result.row_layers / work if work else 1.0 / len(prefills)
            entry.device_ms += share * (event.compute_ms - answers_ms)

    def _drop_captured(self, event: ev.StepDone, out: list[ev.SchedulerCommand]) -> None:
        """The step is one of a blender or scheduler that has crashed since: what it captured is nobody's."""
        for result in event.results:
            if result.prefill is not None and result.request_id not in self._state.entries:
                out.append(ev.Release(result.request_id))

    def _advance(self, entry: Entry, result: ev.ItemResult, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        entry.replan = ""
        entry.stalled = result.status == "stalled"
        if entry.phase is Phase.LOADING and not entry.stalled:
            # what tells of its first layer may come behind the step that took it
            entry.move(Phase.PREFILLING)
        if result.prefill is not None:
            self._prefill_done(entry, result.prefill, at_s, out)
        if result.status == "prefilled":
            self._state.endings.finish(entry, "stop", at_s, out)
            return
        if result.sampled is None:
            return
        if entry.first_token_s is None:
            entry.first_token_s = at_s
            self._state.forecast.note_begun(entry)
            self._state.endings.release_precomputes(entry)
        entry.output_tokens += 1
        entry.output_ids.append(result.sampled.token_id)
        self._say(entry, result.sampled, out)
        if result.sampled.stopped:
            self._state.endings.finish(entry, "stop", at_s, out)
        elif entry.output_tokens >= entry.job.sampling.max_tokens:
            self._state.endings.finish(entry, "length", at_s, out)
        elif entry.phase is Phase.PREFILLING:
            entry.move(Phase.DECODING)

    @staticmethod
    def _say(entry: Entry, sampled: ev.Sampled, out: list[ev.SchedulerCommand]) -> None:
        """A token with text takes those without along; the last one does so too where its log probability is wanted."""
        name = entry.request_id
        entry.silent_ids = (*entry.silent_ids, sampled.token_id)
        if sampled.logprob is not None:
            entry.silent_logprobs = (*entry.silent_logprobs, sampled.logprob)
        last = sampled.stopped or entry.output_tokens >= entry.job.sampling.max_tokens
        if sampled.text or (last and entry.silent_logprobs):
            out.append(ev.Emit(name, Delta(name, sampled.text, entry.silent_ids, entry.silent_logprobs)))
            entry.silent_ids, entry.silent_logprobs = (), ()

    def _distrust(self, entry: Entry, error: float, out: list[ev.SchedulerCommand]) -> None:
        """Stored keys are not those of their tokens: nothing has been said yet, so all is computed again without them.

        Which of the compared chunks it was is not known: all of them go, and are computed anew by whoever needs them.
        """
        self._state.parity_failures += 1
        entry.distrusted = True
        entry.replan = f"layer 0 of stored and fresh keys differs by {error:.2g} of their size: stored chunks dropped"
        marks = entry.decision.plan.reuse if entry.decision is not None else ()
        compared = tuple(index for index, mark in enumerate(marks) if mark is Reuse.CACHED)
        out.append(ev.DropChunks(entry.request_id, compared, entry.replan))
        self._state.admission.plan_again(entry, out)

    def _prefill_done(
        self, entry: Entry, report: ev.PrefillReport, at_s: float, out: list[ev.SchedulerCommand]
    ) -> None:
        """All layers are in place: leases close, captured segments go to the store."""
        # the payloads are taken before the release, which drops what was captured and not asked for
        entry.prefill = report
        self._state.forecast.note_prompt(entry)
        self._note_speed(entry, report)
        for key, segment in entry.owns.items():
            entry.stores_left += 1
            out.append(self._store(entry, segment, key, at_s))
        if entry.loads:
            out.append(ev.Release(entry.request_id))
            entry.loads = False

    def _note_speed(self, entry: Entry, report: ev.PrefillReport) -> None:
        """What a request's prompt took, for the loading controller; its rows are those of whole layers."""
        if entry.job.kind != "generate" or entry.shared or entry.decision is None:
            return
        cached = report.tokens_reused + report.tokens_recomputed - self._exact_tokens(entry)
        rows = report.tokens_fresh + report.charged_ratio * max(0, cached)
        self._state.controller.compute.note(rows, entry.compute_ms / 1e3, blend=cached > 0)

    @staticmethod
    def _exact_tokens(entry: Entry) -> int:
        return entry.decision.plan.count(Reuse.EXACT) if entry.decision is not None else 0

    def _store(self, entry: Entry, segment: int, key: ChunkKey, at_s: float) -> ev.StoreSegment:
        """The command that stores one segment, with what its KV is worth and where it should lie."""
        limits, controller = self._state.limits, self._state.controller
        ids = entry.job.layout.segments[segment].token_ids
        num_bytes = limits.num_layers * limits.layer_token_bytes * len(ids)
        tier = controller.tier_for(len(ids), num_bytes, limits.ratio_floor, at_s)
        entry.loading = replace(entry.loading, store_tier=tier)
        replaces = entry.job.replace and key == entry.job.stored_key
        cost_s = controller.cost_s(len(ids))
        if entry.job.kind == "precompute" and entry.prefill is not None and not entry.shared:
            cost_s = 1e-3 * entry.compute_ms * len(ids) / max(1, entry.prefill.tokens_fresh)
        return ev.StoreSegment(entry.request_id, segment, key, ids, replaces, cost_s, tier)
