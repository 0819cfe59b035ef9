"""In which dtype chunks are stored: what was asked for, or bfloat16 where its check passes. Decided before it opens.

The check is always the same one (the built-in probes, chunks behind the system prompt, nothing computed again),
whatever else a server is set to: a decision that moved with the settings would lose a folder's chunks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvblend.actors.judging import next_piece
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine
from kvblend.engine.evaluation.gate import GateSetting, GateUnfit, ModelGate, gate_prompts
from kvblend.engine.evaluation.gate_report import GateCheck, GateReport
from kvblend.engine.precision import Precision
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.store.notes import read_note, write_note

log = logging.getLogger("kvblend.precision")
AUTO_DTYPE = "bfloat16"
_NOTE, _CHECK_VERSION, _CHECKS_MAX = "precision", 1, 64


@dataclass(frozen=True, slots=True)
class StoreForm:
    """The dtype chunks are stored in, why, and the check that decided it, if one did. `fresh`: it was run just now."""

    dtype: str
    reason: str
    check: GateCheck | None = None
    fresh: bool = False


async def choose_store_form(settings: Settings, engine: Engine, device: DeviceThread) -> StoreForm:
    """What `settings.store_dtype` means for this engine; the check runs in the device thread where no note knows it."""
    if (known := settled_form(settings, engine)) is not None:
        return known
    check = await asyncio.to_thread(recall_check, settings, engine)
    if check is not None:
        return form_of(engine, check)
    log.info("whether chunks of %s can be stored as %s is being judged", settings.model, AUTO_DTYPE)
    try:
        pieces = await device.submit(begin_store_check, engine)
        while not isinstance(piece := await device.submit(next_piece, pieces), GateCheck):
            pass
    except GateUnfit as error:
        return StoreForm(engine.dtype, f"the probes that judge {AUTO_DTYPE} cannot be asked: {error}")
    except Exception as error:
        log.exception("the check of the stored dtype could not be run")
        return StoreForm(engine.dtype, f"{AUTO_DTYPE} could not be judged: {type(error).__name__}: {error}")
    return form_of(engine, piece, fresh=True)


def settled_form(settings: Settings, engine: Engine) -> StoreForm | None:
    """The form where nothing has to be judged, else None."""
    if settings.store_dtype != "auto":
        return StoreForm(settings.store_dtype, "set")
    if engine.dtype == AUTO_DTYPE:
        return StoreForm(engine.dtype, "the compute dtype")
    return None


def form_of(engine: Engine, check: GateCheck, *, fresh: bool = False) -> StoreForm:
    """What the check of bfloat16 decides."""
    if not check.passed:
        log.warning("chunks are stored as %s: %s", engine.dtype, check.reason)
    return StoreForm(AUTO_DTYPE if check.passed else engine.dtype, check.reason, check, fresh)


def begin_store_check(engine: Engine) -> Iterator[GateCheck | None]:
    """The check of bfloat16 on a loaded model, in pieces; for the device thread. Raises GateUnfit."""
    prompts = gate_prompts(engine.tokenizer, engine.template, engine.config.context_length)
    setting = GateSetting(SelectorSpec(), 0.0, "system", math.inf)
    precision = Precision.of_model(engine.runner.model, AUTO_DTYPE)
    return ModelGate(engine.runner.step, prompts, (), setting, precision=precision).check_store_dtype()


def recall_check(settings: Settings, engine: Engine) -> GateCheck | None:
    """The check as the store's folder remembers it, if it does. Blocks."""
    if settings.store is None:
        return None
    note = read_note(settings.store, _NOTE)
    try:
        (check,) = GateReport.from_fields([note["checks"][_key(engine)]]).checks
    except (KeyError, TypeError, ValueError):
        return None
    return check


def keep_check(settings: Settings, engine: Engine, form: StoreForm) -> None:
    """Remember a check that was just run in the store's folder, which must be claimed. Blocks; a failure is logged."""
    if settings.store is None or form.check is None or not form.fresh:
        return
    key = _key(engine)
    kept: Any = read_note(settings.store, _NOTE).get("checks")
    checks = {k: v for k, v in kept.items() if k != key} if isinstance(kept, dict) else {}
    newest = dict(list(checks.items())[-(_CHECKS_MAX - 1) :])
    (fields,) = GateReport((form.check,)).to_fields()
    try:
        write_note(settings.store, _NOTE, {"checks": {**newest, key: fields}})
    except OSError as error:
        log.warning("the check of the stored dtype could not be kept: %s", error)


def _key(engine: Engine) -> str:
    """No version of the program: a decision holds until the check itself changes."""
    return f"{_CHECK_VERSION} {engine.fingerprint} {engine.dtype} {AUTO_DTYPE}"
