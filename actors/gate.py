"""The gate of the served model: judged in the device thread, remembered in the store's folder, asked by requests."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from kvblend.actors.bounds import KLBounds
from kvblend.actors.judging import finding_key, judged_conditioning, next_piece
from kvblend.actors.messages import BlendOptions, Generate
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.selection import budget_ratio
from kvblend.actors.settings import Settings
from kvblend.actors.waiting import WaitingRoom
from kvblend.engine.assembly import Engine
from kvblend.engine.conditioning import passages_of, warm_ids
from kvblend.engine.evaluation.gate import GateSetting, GateUnfit, ModelGate, gate_prompts
from kvblend.engine.evaluation.gate_report import GateCheck, GateReport
from kvblend.store.notes import read_note, write_note

log = logging.getLogger("kvblend.gate")
GateState = Literal["off", "running", "passed", "failed"]
_NOTE, _REPORTS_MAX = "gate", 64


class ServingGate:
    """Holds requests back until the model is judged; those of a model that failed are answered by full prefill.

    With `max_kl` they wait, too, until it is known how their KL is to be estimated: `bounds`.

    Its methods belong to the event loop. `start` once, `close` at the end.
    """

    def __init__(self, settings: Settings, engine: Engine, device: DeviceThread) -> None:
        self._settings = settings
        self._engine = engine
        self._device = device
        self._task: asyncio.Task[None] | None = None
        self._room = WaitingRoom(settings.queue_requests_max)
        self.bounds = KLBounds(settings, engine, device)
        self._served_full = 0
        self.report: GateReport | None = None

    def start(self) -> None:
        """Begin judging in the background, unless the gate is off."""
        self.bounds.start()
        if self._settings.gate == "auto":
            self._task = asyncio.get_running_loop().create_task(self._run(), name="gate")

    async def close(self) -> None:
        """Give up judging. Whoever waits goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self.bounds.close()

    @property
    def state(self) -> GateState:
        """Where it stands."""
        if self._settings.gate == "off":
            return "off"
        return "running" if self.report is None else "passed" if self.report.passed else "failed"

    @property
    def reasons(self) -> tuple[str, ...]:
        """What failed, in words."""
        return () if self.report is None else self.report.reasons

    def figures(self) -> dict[str, object]:
        """For `/ready`: state, reasons, whether a failure is overridden, requests that were made full prefills, and
        the estimates of `max_kl`.
        """
        return {
            "state": self.state,
            "reasons": list(self.reasons),
            "forced": self.state == "failed" and self._settings.force_blend,
            "requests_served_full": self._served_full,
            "bounds": self.bounds.figures(),
        }

    async def admit(self, request: Generate) -> tuple[Generate, str]:
        """The request as it is to be answered, once the model is judged, with a note on what was changed, or "".

        Requests that store, or that reuse nothing, pass at once. RequestError where its deadline passes meanwhile, or
        too many wait.
        """
        if not request.generate or request.blend.mode == "full":
            return request, ""
        if self.state == "off":
            return await self.bounds.admit(request)
        if self._task is not None and not self._task.done():
            request = await self._room.wait(request, self._task, "the model's gate")
        if self.state != "failed" or self._settings.force_blend:
            return await self.bounds.admit(request)
        self._served_full += 1
        note = f"the model failed its gate and is served by full prefill: {'; '.join(self.reasons)}"
        return replace(request, blend=replace(request.blend, mode="full")), note

    async def _run(self) -> None:
        key = await asyncio.to_thread(report_key, self._settings, self._engine)
        report = await self._recall(key)
        if report is None:
            log.info("the gate of %s is running", self._settings.model)
            try:
                report = await self.judge()
                await self._keep(key, report)
            except GateUnfit as error:
                report = refusal("probes", str(error))
            except Exception as error:
                log.exception("the gate could not be run")
                report = refusal("gate", f"it could not be run: {type(error).__name__}: {error}")
        self.report = report
        if not report.passed:
            outcome = "blended all the same" if self._settings.force_blend else "by full prefill"
            log.warning("the model failed its gate and is served %s: %s", outcome, "; ".join(report.reasons))

    async def judge(self) -> GateReport:
        """Run all checks now, a piece at a time: the device serves others in between. Raises GateUnfit."""
        checks = await self._device.submit(begin_checks, self._settings, self._engine)
        found: list[GateCheck] = []
        while True:
            piece = await self._device.submit(next_piece, checks)
            if isinstance(piece, GateCheck):
                found.append(piece)
            elif piece == "end":
                return GateReport(tuple(found))

    async def _recall(self, key: str) -> GateReport | None:
        if self._settings.store is None:
            return None
        note = await asyncio.to_thread(read_note, self._settings.store, _NOTE)
        try:
            return GateReport.from_fields(note["reports"][key])
        except (KeyError, TypeError, ValueError):
            return None

    async def _keep(self, key: str, report: GateReport) -> None:
        if self._settings.store is None:
            return
        try:
            await asyncio.to_thread(_add_report, self._settings, key, report)
        except OSError as error:
            log.warning("the gate's findings could not be kept: %s", error)


def begin_checks(settings: Settings, engine: Engine) -> Iterator[GateCheck | None]:
    """The gate of an engine at its server's setting; for the device thread. Raises GateUnfit."""
    config = engine.config
    prompts = gate_prompts(engine.tokenizer, engine.template, config.context_length)
    setting = GateSetting(
        settings.selection,
        budget_ratio(settings, BlendOptions()),
        judged_conditioning(settings),
        settings.gate_kl_max,
    )
    warm = warm_ids(engine.tokenizer, engine.config.context_length, passages_of(settings.warm_text))
    return ModelGate(engine.runner.step, prompts, warm, setting, precision=engine.runner.precision).checks()


def report_key(settings: Settings, engine: Engine) -> str:
    """Names what a report is valid for: model, arithmetic, setting and program version. Blocks shortly."""
    return finding_key(settings, engine, settings.recompute_ratio, settings.selection, settings.gate_kl_max)


def refusal(name: str, reason: str) -> GateReport:
    """The report of a model that could not be judged."""
    return GateReport((GateCheck(name, math.inf, 0.0, False, reason),))


def _add_report(settings: Settings, key: str, report: GateReport) -> None:
    if settings.store is None:
        return
    kept: Any = read_note(settings.store, _NOTE).get("reports")
    reports = {k: v for k, v in kept.items() if k != key} if isinstance(kept, dict) else {}
    newest = list(reports.items())[-(_REPORTS_MAX - 1) :]
    write_note(settings.store, _NOTE, {"reports": {**dict(newest), key: report.to_fields()}})
