"""How KL is estimated, per way of choosing rows: remembered in the store's folder, or measured once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvblend.actors.judging import finding_key, judged_conditioning, next_piece
from kvblend.actors.messages import Generate
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.selection import kl_bound, merge_selection
from kvblend.actors.settings import Settings
from kvblend.actors.waiting import WaitingRoom
from kvblend.engine.assembly import Engine
from kvblend.engine.bound import KLModel
from kvblend.engine.conditioning import passages_of, warm_ids
from kvblend.engine.evaluation.bound_fit import fit_level
from kvblend.engine.evaluation.calibration import Calibration, Sample, calibration_questions
from kvblend.engine.kl_models import SHAPE
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.store.notes import read_note, write_note

log = logging.getLogger("kvblend.bounds")
_NOTE, _KEPT_MAX = "bounds", 64
_WHAT = "the calibration of max_kl"


class KLBounds:
    """Finds out, before the first request with `max_kl` is planned, how its KL is to be estimated.

    Its methods belong to the event loop. `start` once, `close` at the end.
    """

    def __init__(self, settings: Settings, engine: Engine, device: DeviceThread) -> None:
        self._settings = settings
        self._engine = engine
        self._device = device
        self._room = WaitingRoom(settings.queue_requests_max)
        self._tasks: dict[SelectorSpec, asyncio.Task[None]] = {}
        self._models: dict[SelectorSpec, KLModel] = {}
        self._failures: dict[SelectorSpec, str] = {}

    def start(self) -> None:
        """Begin with the server's own way of choosing rows, where every request is bounded."""
        if self._settings.max_kl is not None:
            self._begin(kind_of(self._settings.selection))

    async def close(self) -> None:
        """Give up measuring. Whoever waits goes on, unbounded requests only."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def figures(self) -> dict[str, object]:
        """For `/ready`: calibrations known, running and failed."""
        running = sum(not task.done() for task in self._tasks.values())
        return {"known": len(self._models), "running": running, "failures": sorted(set(self._failures.values()))}

    async def admit(self, request: Generate) -> tuple[Generate, str]:
        """The request as it is to be answered, once its KL can be estimated, with a note on what was changed, or "".

        Where that cannot be had it becomes a full prefill. Raises what `WaitingRoom.wait` does.
        """
        if not request.generate or kl_bound(self._settings, request.blend) is None:
            return request, ""
        kind = kind_of(merge_selection(self._settings, request.blend))
        task = self._begin(kind)
        if not task.done():
            request = await self._room.wait(request, task, _WHAT)
        if kind in self._models:
            return request, ""
        why = self._failures.get(kind, "it was given up")
        note = f"max_kl: how the KL is to be estimated could not be found out, so full prefill: {why}"
        return replace(request, blend=replace(request.blend, mode="full")), note

    def model_for(self, spec: SelectorSpec) -> KLModel | None:
        """The estimate for requests that choose their rows like this, None where there is none (yet)."""
        return self._models.get(kind_of(spec))

    def _begin(self, kind: SelectorSpec) -> asyncio.Task[None]:
        if kind not in self._tasks:
            for old in [k for k, task in self._tasks.items() if task.done()][: len(self._tasks) - _KEPT_MAX + 1]:
                # requests that are on their way keep what they were given
                del self._tasks[old]
                self._models.pop(old, None)
                self._failures.pop(old, None)
            self._tasks[kind] = asyncio.get_running_loop().create_task(self._find(kind), name="calibration")
        return self._tasks[kind]

    async def _find(self, kind: SelectorSpec) -> None:
        settings, engine = self._settings, self._engine
        key = await asyncio.to_thread(model_key, settings, engine, kind)
        model = await self._recall(key)
        if model is None:
            model = await self._measure(kind)
            if model is not None:
                await self._keep(key, model)
        if model is not None:
            self._models[kind] = model

    async def _measure(self, kind: SelectorSpec) -> KLModel | None:
        """Run the probes, a piece at a time: the device serves others in between."""
        log.info("max_kl: measuring how the KL of %s is to be estimated", kind.selector)
        found: list[Sample] = []
        try:
            pieces = await self._device.submit(begin_samples, self._settings, self._engine, kind)
            while (piece := await self._device.submit(next_piece, pieces)) != "end":
                if isinstance(piece, Sample):
                    found.append(piece)
            return fit_level(SHAPE, found)
        except ValueError as error:
            self._failures[kind] = str(error)
        except Exception as error:
            log.exception("the calibration could not be run")
            self._failures[kind] = f"{type(error).__name__}: {error}"
        return None

    async def _recall(self, key: str) -> KLModel | None:
        if self._settings.store is None:
            return None
        note = await asyncio.to_thread(read_note, self._settings.store, _NOTE)
        try:
            return KLModel.from_fields(note["models"][key])
        except (KeyError, TypeError, ValueError):
            return None

    async def _keep(self, key: str, model: KLModel) -> None:
        if self._settings.store is None:
            return
        try:
            await asyncio.to_thread(_add_model, self._settings, key, model)
        except OSError as error:
            log.warning("the calibration could not be kept: %s", error)


def kind_of(spec: SelectorSpec) -> SelectorSpec:
    """What of a spec a calibration depends on: not its seed, nor how many rows it chooses."""
    return replace(spec, seed=0, recompute_ratios=(), thresholds=())


def begin_samples(settings: Settings, engine: Engine, kind: SelectorSpec) -> Iterator[Sample | None]:
    """The samples of an engine for one way of choosing rows; for the device thread. Raises ValueError."""
    conditioning = judged_conditioning(settings)
    warms = conditioning == "warm"
    context = engine.config.context_length
    warm = warm_ids(engine.tokenizer, context, passages_of(settings.warm_text)) if warms else ()
    return Calibration(
        engine.runner.step,
        engine.tokenizer,
        engine.template,
        calibration_questions(),
        warm,
        kind,
        conditioning,
        engine.runner.precision,
    ).samples()


def model_key(settings: Settings, engine: Engine, kind: SelectorSpec) -> str:
    """Names what a calibration is valid for: model, arithmetic, stored form, conditioning, selection and version."""
    return finding_key(settings, engine, kind)


def _add_model(settings: Settings, key: str, model: KLModel) -> None:
    if settings.store is None:
        return
    kept: Any = read_note(settings.store, _NOTE).get("models")
    models = {k: v for k, v in kept.items() if k != key} if isinstance(kept, dict) else {}
    newest = list(models.items())[-(_KEPT_MAX - 1) :]
    write_note(settings.store, _NOTE, {"models": {**dict(newest), key: model.to_fields()}})
