"""How fast this machine computes, measured before the first request: short blends as its server would run them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvblend.actors.messages import BlendOptions
from kvblend.actors.selection import merge_selection
from kvblend.actors.settings import Settings
from kvblend.actors.stores import stored_shape
from kvblend.engine.assembly import Engine
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.output import OutputText
from kvblend.engine.runner import Runner, SequenceSpec, TickResult
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector

log = logging.getLogger("kvblend.actors")
NAME = "/profile"
CPU_TOKENS = (32, 256)
ACCELERATOR_TOKENS = (32, 512, 4096)
"""Lengths of the cached chunk, one blend each. The work of an accelerator is long before it is more than overhead."""
QUESTION_TOKENS = 16
PROFILE_S_MAX = 0.5
"""A longer chunk is blended only where that should take less. A short one makes rows look dearer than they are."""
TICKS_MAX = 64


class PrefillSpeed(NamedTuple):
    """So many rows through all layers took so many seconds, in a blend."""

    rows: float
    seconds: float


class _Zeros:
    """A LayerSource whose one chunk, from position 0 on, is all zeros: what is computed is the same."""

    def __init__(self, layer_bytes: int) -> None:
        self._payload = memoryview(bytearray(layer_bytes))

    def take(self, layer: int) -> Sequence[tuple[int, memoryview]]:
        """The same payload for each layer."""
        return ((0, self._payload),)


def profile_prefill(settings: Settings, engine: Engine) -> PrefillSpeed | None:
    """Time short blends under these settings; the longest one's speed, None where it could not be learnt.

    For the device thread, before anything runs. Without a folder and a remote tier nothing is decided by it, and
    nothing is timed. Never raises for what goes wrong in a blend.
    """
    if settings.store is None and not settings.remote:
        return None
    on_cpu = settings.device == "cpu"
    lengths: tuple[int, ...] = CPU_TOKENS if on_cpu else ACCELERATOR_TOKENS
    room = min(engine.config.context_length, settings.kv_tokens_max) - QUESTION_TOKENS - 1
    speed, before = None, lengths[0]
    try:
        if before <= room:
            # the first one of a process also pays for programs, threads and memory that the others find made
            speed = _time_blend(settings, engine, before)
        if on_cpu and speed is not None and speed.seconds > PROFILE_S_MAX:
            lengths = ()
        for tokens in lengths:
            if tokens > room:
                break
            if tokens > before and (speed is None or _predict_s(speed, before, tokens) > PROFILE_S_MAX):
                break
            speed, before = _time_blend(settings, engine, tokens), tokens
    except Exception as error:  # requests will tell, in their own words and with their own outcome
        log.warning("how fast prompts are computed was not learnt at the start: %s", error)
    if speed is not None:
        log.info("computing: %.0f rows/s in a blend of %d tokens", speed.rows / speed.seconds, before)
    return speed


def _predict_s(speed: PrefillSpeed, before: int, tokens: int) -> float:
    """Seconds that a blend of a chunk of `tokens` should take, after what one of `before` took."""
    share = (speed.rows - QUESTION_TOKENS) / before
    return (QUESTION_TOKENS + share * tokens) * speed.seconds / speed.rows


def _time_blend(settings: Settings, engine: Engine, tokens: int) -> PrefillSpeed | None:
    runner = engine.runner
    ids = [7 * index % engine.config.vocab_size for index in range(tokens + QUESTION_TOKENS)]
    layout = PromptLayout.of([(SegmentKind.CHUNK, ids[:tokens]), (SegmentKind.QUESTION, ids[tokens:])])
    plan = BlendPlan.of(layout, (Reuse.CACHED, Reuse.FRESH), settings.ratio_floor)
    spec = SequenceSpec(
        NAME,
        plan,
        build_selector(merge_selection(settings, BlendOptions())) if plan.budget else PlainSelector(),
        len(ids) + 1,
        _Zeros(stored_shape(engine).layer_bytes(tokens)),
        sampling=SamplingPlan(0.0, 1.0, 0),
        # the token is what the device is waited for
        output=OutputText(engine.tokenizer.stream(), (), (), 1, 0, engine.tokenizer),
    )
    try:
        runner.start(spec)
        began = time.perf_counter()
        last = _run(runner, len(ids))
        seconds = time.perf_counter() - began
    finally:
        runner.free(NAME)
    if last is None or last.figures is None:
        return None
    cached = last.figures.tokens_reused + last.figures.tokens_recomputed
    return PrefillSpeed(last.figures.tokens_fresh + last.figures.charged_ratio * cached, seconds)


def _run(runner: Runner, rows_max: int) -> TickResult | None:
    """Tick until the prompt is done, or is not going to be."""
    for _ in range(TICKS_MAX):
        (result,) = runner.tick([(NAME, rows_max, None)])
        if result.figures is not None:
            return result
        if result.status not in ("running", "stalled"):
            break
    return None
