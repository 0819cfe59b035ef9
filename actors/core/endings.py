"""How jobs end: finished, cancelled or failed, each with exactly one terminal event; and what they leave to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvblend.actors.core import events as ev
from kvblend.actors.core.entry import EndKind, Entry
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.messages import Failed, Finished, FinishReason, StoredChunk
from kvblend.store.keys import ChunkKey

if TYPE_CHECKING:
    from kvblend.actors.core.scheduler import SchedulerState


class Endings:
    """Terminal transitions. A precompute job stays an entry until its chunk is durable; an answer does not wait."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def cancel(self, event: ev.CancelRequested, out: list[ev.SchedulerCommand]) -> None:
        """End a job now, or after the step that it is in. Unknown jobs are left alone.

        A precompute job whose chunk is on its way to the store is past cancelling.
        """
        entry = self._state.entries.get(event.request_id)
        if entry is not None and entry.ending is None and not (entry.job.kind == "precompute" and entry.stores_left):
            self._end_soon(entry, "deadline" if event.deadline else "cancelled", event.detail, event.at_s, out)

    def _end_soon(self, entry: Entry, kind: EndKind, detail: str, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        entry.ending = (kind, detail)
        if entry.in_step:
            out.append(ev.FlagCancelled(entry.request_id))
        else:
            self.end_early(entry, at_s, out)

    def end_early(self, entry: Entry, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        """The terminal event of a job that somebody or something ended."""
        kind, detail = entry.ending or ("cancelled", "")
        if kind == "cancelled":
            finished = Finished(entry.request_id, "cancelled", entry.usage(at_s), detail=detail)
            self._end(entry, Phase.CANCELLED, finished, out)
        else:
            self.fail(entry, "deadline_exceeded" if kind == "deadline" else "internal", detail, out)

    def fail(self, entry: Entry, code: str, message: str, out: list[ev.SchedulerCommand]) -> None:
        """The terminal event of a job that cannot be completed."""
        self._end(entry, Phase.FAILED, Failed(entry.request_id, code, message), out)

    def finish(self, entry: Entry, reason: FinishReason, at_s: float, out: list[ev.SchedulerCommand]) -> None:
        """The terminal event of a completed job; a precompute job waits for its chunk to be durable."""
        if entry.job.kind == "precompute":
            if entry.stores_left:
                out.append(ev.FreeSequence(entry.request_id))
                self._state.return_pages(entry)
                return
            job = entry.job
            chunk = StoredChunk(job.stored_key.id, entry.last_chunk_tokens(), entry.created, job.conditioning)
            finished = Finished(entry.request_id, reason, entry.usage(at_s), chunks=(chunk,))
        else:
            finished = Finished(entry.request_id, reason, entry.usage(at_s))
            self._state.forecast.note_answer(entry.decode_ms, entry.output_tokens)
        self._end(entry, Phase.FINISHED, finished, out)

    def stored(self, event: ev.Stored, out: list[ev.SchedulerCommand]) -> None:
        """A chunk is durable or could not be written: whoever waits for it looks again."""
        if self._state.inflight.get(event.key) != event.request_id:
            return  # given up since: the loader crashed
        self._resolve(event.key)
        entry = self._state.entries.get(event.request_id)
        if entry is None or entry.owns.pop(event.key, None) is None:
            return
        entry.stores_left -= 1
        if event.error:
            entry.notes.append(event.error)
        if entry.job.kind != "precompute":
            return
        own = event.key == entry.job.stored_key
        entry.created = entry.created or (own and event.created)
        if own and event.error:
            self.fail(entry, "internal", event.error, out)
        elif not entry.stores_left and entry.prefill is not None:
            self.finish(entry, "stop", event.at_s, out)

    def peer_crashed(self, event: ev.PeerCrashed, out: list[ev.SchedulerCommand]) -> None:
        """Fail at once what the crashed actor held; everything else goes on."""
        state = self._state
        detail = f"the {event.name} failed and was restarted"
        if event.name == "blender":
            for request_id in state.step or ():
                if request_id in state.entries:
                    state.entries[request_id].in_step = False
            state.step = None
            state.continuing.forget()
        else:
            state.admission.ahead.clear()
        for entry in list(state.entries.values()):
            computing = entry.phase in (Phase.LOADING, Phase.PREFILLING, Phase.DECODING)
            if event.name == "blender":
                held = (computing and entry.prefill is None) or entry.phase is Phase.DECODING
            else:
                lost_store = entry.stores_left > 0
                entry.stores_left = 0
                held = entry.looking_up or entry.loads or (lost_store and entry.job.kind == "precompute")
                if lost_store and not held:
                    self.disown(entry)
            if held and entry.ending is None:
                self._end_soon(entry, "fault", detail, event.at_s, out)
            elif held and not entry.in_step:
                # it was to end after the step that has just been lost
                self.end_early(entry, event.at_s, out)
        if event.name == "loader":
            for key in [key for key, owner in state.inflight.items() if owner not in state.entries]:
                self._resolve(key)

    def release_precomputes(self, entry: Entry) -> None:
        """The first token is out: the chunks it missed may be computed now."""
        self._state.queue_changed = True
        for other in self._state.entries.values():
            if other.waits_for == entry.request_id:
                other.waits_for = None

    def disown(self, entry: Entry) -> None:
        """Give up the keys that a job computes and has not handed to the store yet."""
        if entry.stores_left:
            return
        for key in entry.owns:
            self._resolve(key)
        entry.owns.clear()

    def _end(self, entry: Entry, phase: Phase, terminal: Finished | Failed, out: list[ev.SchedulerCommand]) -> None:
        entry.move(phase)
        kept = phase is Phase.FINISHED and self._state.continuing.offer(entry, out)
        self._state.return_pages(entry)
        out.append(ev.Emit(entry.request_id, terminal))
        if entry.decision is not None and not kept:
            out.append(ev.FreeSequence(entry.request_id))
        out.append(ev.Release(entry.request_id))
        self.disown(entry)
        self._state.entries.pop(entry.request_id)
        self._state.admission.ahead.discard(entry.request_id)
        self._drop_or_release_precomputes(entry)

    def _drop_or_release_precomputes(self, entry: Entry) -> None:
        """Jobs queued behind an answer that never came run only if somebody else waits for their chunk."""
        wanted = {key for other in self._state.entries.values() for key in other.waits}
        for other in [o for o in self._state.entries.values() if o.waits_for == entry.request_id]:
            other.waits_for = None
            if entry.first_token_s is None and not wanted & set(other.owns):
                self.disown(other)
                del self._state.entries[other.request_id]

    def _resolve(self, key: ChunkKey) -> None:
        self._state.inflight.pop(key, None)
        for other in self._state.entries.values():
            other.waits.discard(key)
