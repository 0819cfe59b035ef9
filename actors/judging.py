"""What the gate, the calibration of bounds and the check of a stored form share."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator
from typing import Literal, TypeVar

from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine
from kvblend.engine.recommended import Conditioning

T = TypeVar("T")


def next_piece(pieces: Iterator[T | None]) -> T | Literal["more", "end"]:
    """One piece of work; for the device thread, whose futures cannot carry a StopIteration."""
    try:
        return next(pieces) or "more"
    except StopIteration:
        return "end"


def judged_conditioning(settings: Settings) -> Conditioning:
    """What chunks are computed behind while a model is judged.

    Chunks with given neighbours do better than the warm text, which stands for them here.
    """
    known: dict[str, Conditioning] = {"bare": "bare", "system": "system"}
    return known.get(settings.conditioning, "warm")


def finding_key(settings: Settings, engine: Engine, *more: object) -> str:
    """Names what a finding is valid for: version, model, arithmetic, stored form, conditioning, and `more`.

    Blocks shortly.
    """
    try:
        version = importlib.metadata.version("kvblend")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    arithmetic = (engine.fingerprint, engine.dtype, engine.stored, settings.device, engine.attention)
    what = (version, *arithmetic, settings.conditioning, settings.warm_text, *more)
    return hashlib.sha256(repr(what).encode()).hexdigest()
