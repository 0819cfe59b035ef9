"""The scheduler's pure core: all jobs from arrival to end. Events in, commands out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvblend.actors.core import events as ev
from kvblend.actors.core.admission import Admission
from kvblend.actors.core.continuing import Continuing
from kvblend.actors.core.controller import Controller
from kvblend.actors.core.endings import Endings
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.forecast import Forecast
from kvblend.actors.core.lever import RatioLever
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.core.limits import Limits
from kvblend.actors.core.ordering import Ordering, policy_of
from kvblend.actors.core.pacing import Pace
from kvblend.actors.core.stepping import Stepping
from kvblend.store.keys import ChunkKey


class InvariantBroken(RuntimeError):
    """`validate` found the core's state inconsistent; the message says where."""


class SchedulerState:
    """All jobs, queued by `ordering`. One step is in flight at most; feedback is never waited for.

    `inflight` maps the key of every chunk that is being computed to the job that does it. `new_number` never returns
    the same number twice, not even to another state. `story_length` events per request are kept for `story`.
    """

    def __init__(self, limits: Limits, new_number: Callable[[], int], story_length: int = 64) -> None:
        self.limits = limits
        self.controller = Controller(limits.num_layers, may_compute=limits.computes_slow_loads)
        self.new_number = new_number
        self.entries: dict[str, Entry] = {}
        self.queue_changed = False
        self._running: dict[str, Entry] = {}
        self.inflight: dict[ChunkKey, str] = {}
        self.step: tuple[str, ...] | None = None
        self.step_number = 0
        self.pages_used = 0
        self.parity_failures = 0
        self.forecast = Forecast(limits.max_num_seqs)
        policy = policy_of(limits.policy, self.forecast.served_s, limits.max_num_batched_tokens)
        self.ordering = Ordering(policy)
        self.pace = Pace(limits.itl_ms_max, limits.num_layers)
        self.lever = RatioLever(limits.ratio_lever_floor, limits.max_num_seqs)
        self.continuing = Continuing(self)
        self.admission = Admission(self)
        self.stepping = Stepping(self)
        self.endings = Endings(self)
        self._story_length = story_length
        self._stories: dict[str, list[str]] = {}

    def handle(self, event: ev.SchedulerEvent) -> list[ev.SchedulerCommand]:
        """Apply one event; the commands are to be performed in order."""
        out: list[ev.SchedulerCommand] = []
        self._note(event)
        match event:
            case ev.Submitted():
                self.admission.submitted(event, out)
            case ev.CancelRequested():
                self.endings.cancel(event, out)
            case ev.LookedUp():
                self.admission.looked_up(event, out)
            case ev.FirstLayerLoaded(request_id):
                entry = self.entries.get(request_id)
                if entry is not None and entry.phase is Phase.LOADING:
                    entry.move(Phase.PREFILLING)
            case ev.Unstalled(request_id):
                if request_id in self.entries:
                    self.entries[request_id].stalled = False
            case ev.LoadFailed():
                self.admission.load_failed(event, out)
            case ev.StepDone():
                self.stepping.step_done(event, out)
            case ev.Stored():
                self.endings.stored(event, out)
            case ev.PeerCrashed():
                self.endings.peer_crashed(event, out)
        # most steps change nothing for those who wait
        if self.queue_changed or not isinstance(event, ev.StepDone | ev.FirstLayerLoaded | ev.Unstalled):
            self.queue_changed = False
            self.admission.admit(event.at_s, out)
        self.stepping.plan_step(event.at_s, out)
        return out

    @property
    def idle(self) -> bool:
        """Nothing queued, running or being stored."""
        return not self.entries and not self.inflight and self.step is None

    @property
    def writes(self) -> int:
        """Chunks that are being written, also those of jobs that have ended."""
        ended = sum(owner not in self.entries for owner in self.inflight.values())
        return ended + sum(entry.stores_left for entry in self.entries.values())

    def running(self) -> Iterator[Entry]:
        """Entries that hold KV pages, in order of admission."""
        return iter(self._running.values())

    @property
    def num_running(self) -> int:
        """How many hold KV pages."""
        return len(self._running)

    def reserve_pages(self, entry: Entry, count: int) -> None:
        """Take KV pages for an entry that has none."""
        entry.pages = count
        self.pages_used += count
        self._running[entry.request_id] = entry

    def return_pages(self, entry: Entry) -> None:
        """Give an entry's KV pages back to the count."""
        self.queue_changed = True
        self.pages_used -= entry.pages
        entry.pages = 0
        self._running.pop(entry.request_id, None)

    def validate(self) -> None:
        """Raise InvariantBroken where the state contradicts itself. For tests and debugging."""
        held = sum(entry.pages for entry in self.entries.values()) + self.continuing.kept.pages
        problems = []
        if held != self.pages_used:
            problems.append(f"{self.pages_used} pages counted, {held} held")
        if not 0 <= self.pages_used <= self.limits.pages:
            problems.append(f"{self.pages_used} of {self.limits.pages} pages used")
        if {entry.request_id for entry in self.entries.values() if entry.pages} != set(self._running):
            problems.append(f"{sorted(self._running)} are said to run")
        if self.num_running > self.limits.max_num_seqs:
            problems.append(f"more than {self.limits.max_num_seqs} sequences run")
        for entry in self.entries.values():
            storing = entry.job.kind == "precompute" and entry.prefill is not None
            active = entry.looking_up or (entry.phase is not Phase.QUEUED and not storing)
            if active != bool(entry.pages):
                problems.append(f"{entry.request_id} is {entry.phase} with {entry.pages} pages")
            if entry.ended:
                problems.append(f"{entry.request_id} has ended and is still an entry")
            if entry.in_step != (self.step is not None and entry.request_id in self.step):
                problems.append(f"{entry.request_id} disagrees about being in the step")
            problems += _broken_claims(entry, self.inflight)
            if entry.waits_for is not None and entry.waits_for not in self.entries:
                problems.append(f"{entry.request_id} waits for {entry.waits_for}, which is gone")
        if problems:
            raise InvariantBroken("; ".join(problems))

    def story(self, request_id: str) -> str:
        """What happened to a job, an event a line; also to the newest job of a request (its id before the `#`)."""
        names = [name for name in self._stories if request_id in (name, name.rpartition("#")[0])]
        return "\n".join(self._stories[names[-1]]) if names else f"nothing is known of {request_id}"

    def _note(self, event: ev.SchedulerEvent) -> None:
        name = type(event).__name__
        if isinstance(event, ev.StepDone):
            lines = [(result.request_id, f"{name} {result.status}") for result in event.results]
        elif isinstance(event, ev.Submitted):
            lines = [(event.job.request_id, f"{name} {event.job.kind} of {event.job.layout.num_tokens} tokens")]
        elif isinstance(event, ev.PeerCrashed):
            lines = [(request_id, f"{name} {event.name}") for request_id in self.entries]
        else:
            lines = [(event.request_id, name)]
        for request_id, line in lines:
            story = self._stories.setdefault(request_id, [])
            story.append(f"{event.at_s:.6f} {line}")
            if len(story) > self._story_length:
                del story[1]
        while len(self._stories) > 4 * self._story_length + len(self.entries):
            gone = next((key for key in self._stories if key not in self.entries), None)
            if gone is None:
                return
            del self._stories[gone]


def _broken_claims(entry: Entry, inflight: dict[ChunkKey, str]) -> list[str]:
    """What is wrong with the keys that an entry computes or waits for."""
    name = entry.request_id
    problems = [f"{name} waits for a key nobody computes" for key in entry.waits if key not in inflight]
    problems += [f"{name} waits for itself" for key in entry.waits if inflight.get(key) == name]
    problems += [f"{name} owns a key that is not in flight for it" for key in entry.owns if inflight.get(key) != name]
    if not 0 <= entry.stores_left <= len(entry.owns):
        problems.append(f"{name} has {entry.stores_left} writes under way and {len(entry.owns)} keys")
    return problems
