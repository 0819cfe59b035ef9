"""What the device did while a load ran: steps, their contents, the gaps between them; and what a row costs, fitted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from kvblend.actors.core import events as ev
from kvblend.actors.core.scheduler import SchedulerState
from kvblend.actors.system import System
from kvblend.engine.layout import Reuse


@dataclass(slots=True)
class StepSeen:
    """One step: when it was asked for and reported (monotonic seconds), device time, and the work in it.

    `row_layers` counts rows times layers, `keys` the visible keys of prompts' rows times layers, `decode_keys` those of
    decoding rows; `whole` is False where a prompt went on into another step, so that its work cannot be told.
    """

    number: int
    asked_s: float
    ended_s: float = 0.0
    compute_s: float = 0.0
    prefills: int = 0
    decodes: int = 0
    row_layers: float = 0.0
    keys: float = 0.0
    decode_keys: float = 0.0
    whole: bool = True
    waiting: int = 0


@dataclass(slots=True)
class StepLog:
    """Watches the scheduler's core of a running system. Costs microseconds per event."""

    layers: int
    steps: list[StepSeen] = field(default_factory=list)
    _open: StepSeen | None = None
    _split: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, system: System) -> StepLog:
        """Begin to watch."""
        log = cls(system._engine.config.num_layers)
        state = system._troupe._state
        handle = state.handle

        def watched(event: ev.SchedulerEvent) -> list[ev.SchedulerCommand]:
            if isinstance(event, ev.StepDone):
                log._done(state, event)
            commands = handle(event)
            for command in commands:
                if isinstance(command, ev.RunStep):
                    waiting = sum(1 for entry in state.entries.values() if not entry.pages)
                    log._open = StepSeen(command.number, event.at_s, waiting=waiting)
            return commands

        state.handle = watched  # type: ignore[method-assign]
        return log

    def _done(self, state: SchedulerState, event: ev.StepDone) -> None:
        seen = self._open
        if seen is None or seen.number != event.number:
            return
        seen.ended_s, seen.compute_s = event.at_s, event.compute_ms / 1e3
        for result in event.results:
            entry = state.entries.get(result.request_id)
            if entry is None:
                continue
            if result.prefill is not None and entry.decision is not None:
                seen.prefills += 1
                seen.whole &= result.request_id not in self._split
                rows, keys = prompt_work(entry.decision.plan.count(Reuse.EXACT), result.prefill)
                seen.row_layers += self.layers * rows
                seen.keys += self.layers * keys
            elif result.status == "sampled":
                seen.decodes += 1
                seen.row_layers += self.layers
                seen.decode_keys += self.layers * (entry.job.layout.num_tokens + entry.output_tokens)
            else:
                self._split.add(result.request_id)
                seen.whole = False
        self.steps.append(seen)
        self._open = None

    def summary(self, began_s: float, ended_s: float) -> dict[str, float]:
        """How busy the device was between two moments, and what its steps were like."""
        mine = [step for step in self.steps if began_s <= step.asked_s and step.ended_s <= ended_s]
        busy = sum(step.compute_s for step in mine)
        gaps = [after.asked_s - before.ended_s for before, after in itertools.pairwise(mine)]
        overheads = [step.ended_s - step.asked_s - step.compute_s for step in mine]
        return {
            "seconds": ended_s - began_s,
            "steps": len(mine),
            "busy": busy / max(1e-9, ended_s - began_s),
            "idle_gaps_s": sum(gaps),
            "overhead_s": sum(overheads),
            "prefills_per_step": sum(step.prefills for step in mine) / max(1, len(mine)),
            "decodes_per_step": sum(step.decodes for step in mine) / max(1, len(mine)),
            "decode_only_s": sum(step.compute_s for step in mine if not step.prefills and step.whole),
        }

    def fit(self) -> dict[str, float]:
        """Seconds of a step: a fixed part, one per row and layer, one per visible key and layer; none is below 0.

        Keys cost a decoding row more than a prompt's: it reads them for itself alone.
        """
        mine = [step for step in self.steps if step.whole and step.row_layers]
        return fit_costs([(step.row_layers, step.keys, step.decode_keys, step.compute_s) for step in mine])


def prompt_work(exact: int, report: ev.PrefillReport) -> tuple[float, float]:
    """Rows through all layers of a finished prompt, and the keys they see: a reused prompt's rows see half of it."""
    tokens = report.tokens_reused + report.tokens_recomputed + report.tokens_fresh
    again = report.charged_ratio * max(0, report.tokens_reused + report.tokens_recomputed - exact)
    fresh = report.tokens_fresh
    # fresh rows stand at the end (a question, or what follows an exact prefix)
    return again + fresh, again * tokens / 2 + fresh * (tokens - fresh / 2)


def fit_costs(samples: list[tuple[float, float, float, float]]) -> dict[str, float]:
    """Least squares of relative error over `(row_layers, keys, decode_keys, seconds)`; what is negative is left out."""
    names = ["step_s", "row_layer_s", "key_layer_s", "decode_key_layer_s"]
    if len(samples) < len(names):
        return dict.fromkeys(names, 0.0)
    seconds = np.array([sample[-1] for sample in samples])
    columns = np.array([[1.0, *sample[:-1]] for sample in samples]) / seconds[:, None]
    kept = list(range(len(names)))
    while True:
        scale = np.maximum(np.abs(columns[:, kept]).max(axis=0), 1e-300)
        found, *_ = np.linalg.lstsq(columns[:, kept] / scale, np.ones(len(samples)), rcond=None)
        costs = found / scale
        if costs.min() >= 0.0 or len(kept) == 1:
            break
        del kept[int(costs.argmin())]
    values = dict(zip(kept, costs, strict=True))
    return {name: float(max(0.0, values.get(index, 0.0))) for index, name in enumerate(names)}
