"""The loader's shell as a model: the real `LoadingState` decides what is read, the model store when it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvblend.actors.core import events as ev
from kvblend.actors.core.loading import DeliverLayer, LoadCommand, LoadingState, Rank, ReadRun
from kvblend.store.keys import ChunkKey
from simulation.disk import ModelStore

LOOKAHEAD_LAYERS = 2
Later = Callable[[float, Callable[[float], None]], None]
"""Have something called at a time, with that time."""


@dataclass(slots=True, eq=False)
class Load:
    """One request's chunks by segment. `name` is the core's name of this load; `opened`: the core knows it."""

    name: str
    job: ev.Job
    rank: Rank
    chunks: dict[int, ChunkKey] = field(default_factory=dict)
    opened: bool = False
    closed: bool = False


class ModelLoader:
    """Takes the scheduler's commands; `tell` gets its events, `delivered` the layers. `taken`: how far a device is."""

    def __init__(
        self,
        store: ModelStore,
        window: int,
        later: Later,
        tell: Callable[[ev.SchedulerEvent], None],
        delivered: Callable[[str, int, float], None],
        taken: Callable[[str], int],
    ) -> None:
        self.store = store
        self._state = LoadingState(store.num_layers, window)
        self._later, self._tell, self._delivered, self._taken = later, tell, delivered, taken
        self._loads: dict[str, Load] = {}
        self._ahead: dict[str, Load] = {}
        self._by_name: dict[str, Load] = {}
        self._count = 0

    def perform(self, command: ev.LoaderCommand, at_s: float) -> None:
        """Carry out one command of the scheduler."""
        match command:
            case ev.Lookup(job, deadline_s):
                self._close(self._ahead.pop(job.request_id, None), at_s)
                load = self._loads[job.request_id] = self._new_load(job, deadline_s)
                self._later(at_s + self.store.costs.lookup_s, lambda now: self._looked_up(load, now))
            case ev.LookAhead(job, deadline_s):
                self._close(self._ahead.pop(job.request_id, None), at_s)
                load = self._ahead[job.request_id] = self._new_load(job, deadline_s)
                self._later(at_s + self.store.costs.lookup_s, lambda now: self._look_ahead(load, now))
            case ev.StartLoading(name, segments):
                self._start(name, segments, at_s)
            case ev.Release(name):
                self._close(self._loads.pop(name, None), at_s)
                self._close(self._ahead.pop(name, None), at_s)
            case ev.StoreSegment():
                seconds = self.store.write_s(len(command.token_ids))
                self._later(at_s + seconds, lambda now: self._stored(command, now))
            case ev.DropChunks():
                raise RuntimeError("nothing is ever damaged here")

    @property
    def idle(self) -> bool:
        """Nothing is loading."""
        return not self._loads and not self._ahead

    def _new_load(self, job: ev.Job, deadline_s: float) -> Load:
        self._count += 1
        return Load(f"{job.request_id}#{self._count}", job, Rank(deadline_s, self._count))

    def _hits(self, load: Load) -> tuple[ev.Hit, ...]:
        hits = []
        for index, keys in enumerate(load.job.keys):
            for key, exact in keys.lookup:
                tier = self.store.look_up(key)
                if tier is not None:
                    load.chunks[index] = key
                    gone = len(self.store.missing(key))
                    hits.append(ev.Hit(index, exact, tier, gone * self.store.sizes[key]))
                    break
        return tuple(hits)

    def _looked_up(self, load: Load, at_s: float) -> None:
        if not load.closed:
            self._tell(ev.LookedUp(load.job.request_id, self._hits(load), at_s, self.store.speeds()))

    def _look_ahead(self, load: Load, at_s: float) -> None:
        if not load.closed:
            self._hits(load)
            self._open(load, LOOKAHEAD_LAYERS, at_s)

    def _start(self, name: str, segments: tuple[int, ...], at_s: float) -> None:
        load = self._loads[name]
        load.chunks = {index: load.chunks[index] for index in segments}
        if segments:
            self._open(load, None, at_s)

    def _open(self, load: Load, layers: int | None, at_s: float) -> None:
        load.opened = True
        self._by_name[load.name] = load
        missing = {index: self.store.missing(key) for index, key in load.chunks.items()}
        self._carry_out(self._state.open(load.name, missing, load.rank, layers), at_s)

    def _close(self, load: Load | None, at_s: float) -> None:
        if load is None:
            return
        load.closed = True
        if load.opened:
            del self._by_name[load.name]
            self._carry_out(self._state.close(load.name), at_s)

    def _carry_out(self, commands: list[LoadCommand], at_s: float) -> None:
        for command in commands:
            load = self._by_name[command.load]
            match command:
                case ReadRun() as run:
                    keys = [load.chunks[segment] for segment in run.segments]
                    done_s = max(self.store.read(key, run.first, run.stop, at_s) for key in keys)
                    self._later(done_s, lambda now, keys=keys, run=run: self._read(keys, run, now))  # type: ignore[misc]
                case DeliverLayer(_, layer):
                    self._delivered(load.job.request_id, layer, at_s)

    def _read(self, keys: list[ChunkKey], run: ReadRun, at_s: float) -> None:
        for key in keys:
            self.store.read_done(key, run.first, run.stop, at_s)
        for load in self._by_name.values():
            self._state.note_taken(load.name, self._taken(load.job.request_id))
        self._carry_out(self._state.read_done(run.number), at_s)

    def _stored(self, command: ev.StoreSegment, at_s: float) -> None:
        created = command.key not in self.store.disk
        self.store.keep(command.key, len(command.token_ids))
        self._tell(ev.Stored(command.request_id, command.key, created, "", at_s))
