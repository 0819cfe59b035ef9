"""A world around one `SchedulerState`: clients, model actors with queues between them, faults, and what must hold.

Nothing happens by itself: a test takes one message, finishes one piece of work or plants one fault at a time, in any
order. What the real actors should never be told raises AssertionError at once.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from model_actors import ModelBlender, ModelLoader

from kvblend.actors.core import events as ev
from kvblend.actors.core import ordering
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.core.limits import Limits
from kvblend.actors.core.planning import segment_keys, storing_layout
from kvblend.actors.core.scheduler import SchedulerState
from kvblend.actors.messages import MODES, BlendOptions, Failed, Finished, Sampling
from kvblend.engine.layout import BlendPlan, PromptLayout, SegmentKind
from kvblend.store.keys import ChunkKey

SYSTEMS = ((), (1, 2, 3), (4, 5, 6, 7, 8))
CHUNKS = tuple(tuple(range(20 * n, 20 * n + 3 + n)) for n in range(1, 6))
CLIENTS = ("", "a", "b")
KIND = SegmentKind


class SchedulerWorld:
    """Drives one state. `chance` decides what the world leaves open: prompts, output, which work is done first."""

    def __init__(self, limits: Limits, chance: random.Random, check_every: int = 1) -> None:
        self.limits, self.chance, self.check_every = limits, chance, check_every
        self.state = SchedulerState(limits, itertools.count(1).__next__)
        self.mail: deque[ev.SchedulerEvent] = deque()
        captured: set[tuple[str, int]] = set()
        self.loader = ModelLoader(chance, self.mail.append, captured)
        self.blender = ModelBlender(chance, self.mail.append, limits, captured)
        self.loader.blender_inbox = self.blender.inbox
        self.dead: set[str] = set()
        self.jobs: dict[str, ev.Job] = {}
        self.terminals: dict[str, Finished | Failed] = {}
        self.step: ev.RunStep | None = None
        self.looked_up: set[str] = set()
        self.sequences: set[str] = set()
        self.stalled: set[str] = set()
        self.passed: dict[str, int] = {}
        self.now_s = 0.0
        self.events = 0
        # each world has something that is slow: the disk, the device, a mailbox
        self.paces = [chance.choice((1, 3, 10)) for _ in self.moves()]

    def moves(self) -> tuple[Callable[[], bool], ...]:
        """Everything that can happen without a fault."""
        loader, blender = self.loader, self.blender
        return self.take_mail, loader.take, blender.take, loader.answer, loader.load_layer, loader.write, blender.step

    def go_on(self, count: int) -> None:
        """Make this many moves."""
        for move in self.chance.choices(self.moves(), self.paces, k=count):
            move()

    # ---- the client ----

    def submit(self) -> None:
        chance, name = self.chance, f"r{len(self.jobs)}"
        system = chance.choice(SYSTEMS)
        head = [(KIND.SYSTEM, system)] if system else []
        if chance.random() < 0.25:
            job = self._store_job(name, system, chance.choice(CHUNKS))
        else:
            chunks = [(KIND.CHUNK, chance.choice(CHUNKS)) for _ in range(chance.randint(0, 4))]
            layout = PromptLayout.of([*head, *chunks, (KIND.QUESTION, (9,) * chance.randint(1, 4))])
            mode = chance.choice(MODES)
            sampling = Sampling(max_tokens=chance.randint(1, 4))
            keys = segment_keys(layout, mode, self.limits.conditioning, "m", "")
            on_miss: Literal["fresh", "precompute"] = "fresh" if chance.random() < 0.5 else "precompute"
            ratio = chance.choice((0.0, 0.3, 1.0))
            options = BlendOptions(max_kl=chance.choice((None, None, 0.1)))
            job = ev.Job(name, "generate", layout, keys, mode, ratio, options, sampling, on_miss)
        deadline_ms = chance.choice((None, None, 1.0, 50.0, 5000.0)) if job.kind == "generate" else None
        job = replace(job, client=chance.choice(CLIENTS), deadline_ms=deadline_ms)
        self.jobs[name] = job
        self.tell(ev.Submitted(job, 0.0))

    def _store_job(self, name: str, system: tuple[int, ...], ids: tuple[int, ...]) -> ev.Job:
        behind = self.limits.conditioning.parts(system, len(ids))
        replace = self.chance.random() < 0.2
        own = ChunkKey.of("m", "", self.limits.conditioning.behind(system, len(ids)), ids)
        layout, keys = storing_layout(behind, ids, own, len(behind), replace=replace)
        return ev.Job(name, "precompute", layout, keys, "blend", 0.0, BlendOptions(), Sampling(), replace=replace)

    def cancel(self, deadline: bool) -> None:
        if self.jobs:
            self.tell(ev.CancelRequested(self.chance.choice(list(self.jobs)), "enough", 0.0, deadline))

    # ---- the scheduler ----

    def take_mail(self) -> bool:
        if not self.mail:
            return False
        self.tell(self.mail.popleft())
        return True

    def tell(self, event: ev.SchedulerEvent) -> None:
        """Hand one event to the state, check it, and put its commands where they belong."""
        match event:
            case ev.PeerCrashed("blender"):
                self.step = None
            case ev.StepDone(number, results) if self.step is not None and number == self.step.number:
                self.step = None
                self.stalled |= {result.request_id for result in results if result.status == "stalled"}
            case ev.Unstalled(name):
                self.stalled.discard(name)
        self.now_s += self.chance.choice((0.0, 0.001, 0.1))
        self.events += 1
        commands = self.state.handle(replace(event, at_s=self.now_s))
        if self.events % self.check_every == 0:
            self.state.validate()
        self._check_order(commands)
        for command in commands:
            self._check(command)
            self._send(command)

    def _check_order(self, commands: list[ev.SchedulerCommand]) -> None:
        """Nobody who could be admitted is passed more often than the rules say; no more is looked ahead than may be."""
        entries = self.state.entries
        names = [command.job.request_id for command in commands if isinstance(command, ev.Lookup)]
        for name in names:
            self.passed.pop(name, None)
        if not names:
            return
        slow_disk = self.state.writes >= self.limits.max_num_seqs
        waiting = [e for e in entries.values() if e.eligible and not (slow_disk and e.job.kind == "precompute")]
        for entry in waiting:
            count = sum(entries[name].arrival > entry.arrival for name in names if name in entries)
            self.passed[entry.request_id] = count = self.passed.get(entry.request_id, 0) + count
            assert count <= ordering.OVERTAKEN_MAX, f"{entry.request_id} was passed by {count}"
        ahead = self.state.admission.ahead
        assert ahead <= {entry.request_id for entry in waiting}, "who does not wait is looked ahead"
        assert len(ahead) <= self.limits.lookahead_requests_max, f"{ahead} are looked ahead"
        assert len(self.passed) <= len(self.jobs) + len(entries)

    def _check(self, command: ev.SchedulerCommand) -> None:
        match command:
            case ev.Emit(name, event):
                assert name not in self.terminals, f"{name}: {event} after {self.terminals[name]}"
                if isinstance(event, Finished | Failed):
                    self.terminals[name] = event
                    self._check_stored(name, event)
            case ev.Lookup(job):
                assert job.request_id not in self.looked_up, f"{job.request_id} is looked up twice"
                self.looked_up.add(job.request_id)
            case ev.LookAhead(job):
                assert job.request_id not in self.looked_up, f"{job.request_id} is looked ahead behind its look-up"
            case ev.StartLoading(name, _):
                assert name in self.looked_up, f"{name} loads without a look-up"
            case ev.Release(name):
                self.looked_up.discard(name)
            case ev.StartSequence(job, plan, _):
                assert job.request_id not in self.sequences, f"{job.request_id} is started twice"
                self._check_ratio(job, plan)
                self.sequences.add(job.request_id)
            case ev.FreeSequence(name):
                self.sequences.discard(name)
                self.stalled.discard(name)
                members = self.step.items if self.step else ()
                assert name not in {item.request_id for item in members}, f"{name} is freed within its step"
            case ev.RunStep(_, items):
                assert self.step is None, "two steps at a time"
                assert items, "an empty step"
                assert not self.stalled & {item.request_id for item in items}, "a step for a stalled sequence"
                assert sum(item.rows_max for item in items) <= max(self.limits.max_num_batched_tokens, len(items))
                self._check_step({item.request_id for item in items})
                self.step = command

    def _check_ratio(self, job: ev.Job, plan: BlendPlan) -> None:
        floor = self.limits.ratio_lever_floor
        if job.mode != "blend" or job.kind == "precompute":
            return
        held = floor is None or job.options.max_kl is not None
        lowest = job.recompute_ratio if held or floor is None else min(floor, job.recompute_ratio)
        assert lowest <= plan.recompute_ratio <= job.recompute_ratio

    def _check_step(self, members: set[str]) -> None:
        """Whoever decodes is in it, of the prompts one at least, and nobody is left out for long."""
        ready = [e for e in self.state.running() if not e.stalled and e.phase in (Phase.PREFILLING, Phase.DECODING)]
        decoding = {e.request_id for e in ready if e.phase is Phase.DECODING}
        prefilling = {e.request_id for e in ready if e.phase is Phase.PREFILLING and e.prefill is None}
        assert decoding <= members, f"{decoding - members} are left out"
        assert not prefilling or prefilling & members, f"none of {prefilling} goes on"
        assert all(e.skipped <= ordering.SKIPPED_MAX + self.limits.max_num_seqs for e in ready)

    def _check_stored(self, name: str, event: Finished | Failed) -> None:
        """An ingest that says "stored" must be right."""
        job = self.jobs.get(name)
        if job is not None and job.kind == "precompute" and isinstance(event, Finished) and event.reason == "stop":
            key = job.stored_key
            assert key in self.loader.stored | self.loader.forgotten, f"{name} is said to be stored"
            assert [chunk.id for chunk in event.chunks] == [key.id]

    def _send(self, command: ev.SchedulerCommand) -> None:
        match command:
            case ev.Emit():
                pass
            case ev.Lookup() | ev.LookAhead() | ev.StartLoading() | ev.StoreSegment() | ev.Release() | ev.DropChunks():
                if "loader" not in self.dead:
                    self.loader.inbox.append(command)
                elif not isinstance(command, ev.Release):
                    self.mail.append(ev.PeerCrashed("loader", 0.0))
            case _:
                if "blender" not in self.dead:
                    self.blender.inbox.append(command)
                elif isinstance(command, ev.StartSequence | ev.RunStep):
                    self.mail.append(ev.PeerCrashed("blender", 0.0))

    # ---- faults ----

    def crash(self, name: str) -> None:
        """The actor dies with what it held; something it had just finished may still be heard of after the news."""
        before = len(self.mail)
        if self.chance.random() < 0.3:
            _ = self.loader.write() if name == "loader" else self.blender.step()
        late = [self.mail.pop() for _ in range(len(self.mail) - before)]
        if name == "loader":
            self.loader.crash()
        else:
            self.blender.crash()
        self.dead.add(name)
        self.mail.append(ev.PeerCrashed("loader" if name == "loader" else "blender", 0.0))
        self.mail.extend(late)

    def revive(self) -> bool:
        revived = bool(self.dead)
        if "loader" in self.dead:
            self.loader.start()
        self.dead.clear()
        return revived

    # ---- the end ----

    def settle(self, moves_max: int = 20_000) -> None:
        """Finish everything, without new faults; AssertionError where it does not end."""
        moves = (self.revive, *self.moves())
        for _ in range(moves_max):
            if not any(move() for move in self.chance.sample(moves, len(moves))):
                return
        raise AssertionError(f"no end after {moves_max} moves: {self.state.entries}")

    def check_quiet(self) -> None:
        """Every request has ended, nothing is left of anything."""
        state = self.state
        assert set(self.jobs) <= set(self.terminals), f"without an end: {set(self.jobs) - set(self.terminals)}"
        assert state.idle, (state.entries, state.inflight, state.step)
        assert (state.pages_used, state.writes) == (0, 0)
        assert (self.loader.loads, self.looked_up, self.loader.ahead) == ({}, set(), set()), "leases are left"
        assert (self.blender.sequences, self.sequences) == ({}, set()), "KV slots are left"
        assert self.loader.captured == set(), "captured KV is left"
