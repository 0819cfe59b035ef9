"""Drives one `SchedulerState` by hand: short names for jobs, events and what came out."""

from __future__ import annotations

import itertools
from typing import Any, Literal, TypeVar

from kvblend.actors.core import events as ev
from kvblend.actors.core.conditioning import Conditioning
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.limits import Limits
from kvblend.actors.core.planning import segment_keys
from kvblend.actors.core.scheduler import SchedulerState
from kvblend.actors.messages import BlendOptions, Failed, Finished, Mode, Sampling, StreamEvent, TokenLogprob
from kvblend.engine.layout import PromptLayout, SegmentKind
from kvblend.store.keys import ChunkKey

T = TypeVar("T")
SYSTEM = (1, 2, 3)
A, B, C = (10, 11, 12, 13), (20, 21, 22, 23, 24), (30, 31, 32)
QUESTION = (7, 8)
KIND = SegmentKind
REPORT = ev.PrefillReport(0, 0, 9, 1.0, 0.0)


def generate(
    name: str = "r",
    *chunks: tuple[int, ...],
    mode: Mode = "blend",
    on_miss: Literal["fresh", "precompute"] = "fresh",
    max_tokens: int = 4,
    ratio: float = 0.5,
) -> ev.Job:
    """A question over these chunks, behind `SYSTEM`."""
    parts = [(KIND.SYSTEM, SYSTEM), *((KIND.CHUNK, chunk) for chunk in chunks), (KIND.QUESTION, QUESTION)]
    layout = PromptLayout.of(parts)
    keys = segment_keys(layout, mode, Conditioning(), "m", "")
    sampling = Sampling(max_tokens=max_tokens)
    return ev.Job(name, "generate", layout, keys, mode, ratio, BlendOptions(), sampling, on_miss)


def key_of(ids: tuple[int, ...], behind: tuple[int, ...] = SYSTEM) -> ChunkKey:
    return ChunkKey.of("m", "", behind, ids)


def store(name: str, ids: tuple[int, ...]) -> ev.Job:
    """A document to be stored, behind `SYSTEM`."""
    layout = PromptLayout.of([(KIND.SYSTEM, SYSTEM), (KIND.CHUNK, ids)])
    head, own = key_of(SYSTEM, ()), key_of(ids)
    keys = (ev.SegmentKeys(((head, True),), keep=head), ev.SegmentKeys(((own, True),), keep=own))
    return ev.Job(name, "precompute", layout, keys, "blend", 0.0, BlendOptions(), Sampling())


class Driver:
    """Every event is validated; `commands` are those of the last one."""

    def __init__(self, **limits: Any) -> None:
        values = {"pages": 100, "page_tokens": 4, "max_num_seqs": 4, "max_num_batched_tokens": 100}
        self.state = SchedulerState(Limits(**{**values, "blend_min_tokens": 0, **limits}), itertools.count(1).__next__)
        self.commands: list[ev.SchedulerCommand] = []

    def do(self, event: ev.SchedulerEvent) -> list[ev.SchedulerCommand]:
        self.commands = self.state.handle(event)
        self.state.validate()
        return self.commands

    def submit(self, *jobs: ev.Job) -> None:
        for job in jobs:
            self.do(ev.Submitted(job, 0.0))

    def look_up(self, name: str = "r", exact: tuple[int, ...] = (), cached: tuple[int, ...] = ()) -> None:
        """Answer a look-up with hits on these segments."""
        hits = [ev.Hit(index, True, "disk") for index in exact] + [ev.Hit(index, False, "disk") for index in cached]
        self.do(ev.LookedUp(name, tuple(sorted(hits, key=lambda hit: hit.segment)), 1.0))

    def begin(self, job: ev.Job, exact: tuple[int, ...] = (), cached: tuple[int, ...] = ()) -> None:
        """Submit and plan; with hits, the first layer is there."""
        self.submit(job)
        self.look_up(job.request_id, exact, cached)
        if exact or cached:
            self.do(ev.FirstLayerLoaded(job.request_id, 2.0))

    def step(self, *results: ev.ItemResult) -> None:
        """Finish the step under way."""
        self.do(ev.StepDone(self.state.step_number, results, 1.0, 3.0))

    def prefill(self, name: str = "r") -> None:
        """Finish the step under way with this one's prompt done."""
        is_store = self.entry(name).job.kind == "precompute"
        self.step(result(name, "prefilled" if is_store else "sampled", prefill=REPORT))

    def stored(self, name: str, key: ChunkKey, error: str = "") -> None:
        self.do(ev.Stored(name, key, not error, error, 4.0))

    def crash(self, name: Literal["loader", "blender"]) -> None:
        self.do(ev.PeerCrashed(name, 5.0))

    def cancel(self, name: str = "r", deadline: bool = False) -> None:
        self.do(ev.CancelRequested(name, "enough", 6.0, deadline))

    def entry(self, name: str = "r") -> Entry:
        return self.state.entries[name]

    def of(self, kind: type[T]) -> list[T]:
        """The last commands of one kind."""
        return [command for command in self.commands if isinstance(command, kind)]

    def emitted(self) -> list[StreamEvent]:
        return [command.event for command in self.of(ev.Emit)]

    def terminal(self) -> Finished | Failed:
        """The one terminal event among the last commands."""
        (event,) = [event for event in self.emitted() if isinstance(event, Finished | Failed)]
        return event

    def looked_up_ids(self) -> list[str]:
        return [command.job.request_id for command in self.of(ev.Lookup)]


def result(
    name: str,
    status: Literal["running", "stalled", "sampled", "prefilled", "cancelled", "failed", "lost"],
    text: str = "x",
    stopped: bool = False,
    prefill: ev.PrefillReport | None = None,
    error: str = "",
    logprob: TokenLogprob | None = None,
) -> ev.ItemResult:
    sampled = ev.Sampled(5, text, stopped, logprob) if status == "sampled" else None
    return ev.ItemResult(name, status, 1, sampled, prefill, error)
