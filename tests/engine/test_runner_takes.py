"""A chunk that is computed several times to be stored: warm, alone, and behind a copy of itself."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU, Bench, random_ids, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.contrast import contrast
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.runner import Runner, SequenceSpec, TickResult
from kvblend.engine.selectors.plain import PlainSelector

KIND = SegmentKind
MODEL = tiny_model(dtype=torch.float32)
SYSTEM, CHUNK, OTHER = (random_ids(n, n) for n in (6, 15, 12))


def new_runner() -> Runner:
    return Runner(MODEL, SdpaBackend(), SlabPool(MODEL.config, 256, MODEL.dtype, CPU))


def finish(runner: Runner, rows: int = 1000) -> TickResult:
    """Tick until everything is computed."""
    for _ in range(200):
        (result,) = runner.tick([("r", rows, None)])
        if result.status != "running":
            return result
    raise AssertionError("it does not end")


def stored_twice(rows: int = 1000) -> tuple[Runner, TickResult]:
    """A runner that has computed CHUNK behind SYSTEM and OTHER, and again behind SYSTEM alone."""
    layout = PromptLayout.of([(KIND.SYSTEM, SYSTEM), (KIND.SYSTEM, OTHER), (KIND.CHUNK, CHUNK)])
    plan = BlendPlan.of(layout, (Reuse.FRESH,) * 3, 0.0)
    runner = new_runner()
    runner.start(SequenceSpec("r", plan, PlainSelector(), layout.num_tokens, captures=(1, 2), contrast=1))
    return runner, finish(runner, rows=rows)


@pytest.mark.parametrize("rows", [1000, 4])
def test_a_contrast_is_that_of_two_separate_computings(rows: int) -> None:
    runner, result = stored_twice(rows)
    assert result.status == "prefilled"
    bench, config = Bench(MODEL), MODEL.config
    warm, plain = bench.payloads((*SYSTEM, *OTHER), CHUNK), bench.payloads(SYSTEM, CHUNK)
    wanted = contrast(warm, plain, config.num_kv_heads, config.head_dim, MODEL.dtype)
    for got, want in zip(runner.payloads("r", 2), wanted, strict=True):
        floats = [torch.frombuffer(payload, dtype=torch.float32) for payload in (got, want)]
        torch.testing.assert_close(*floats, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rows", [1000, 4])
def test_an_echo_is_the_chunk_behind_a_copy_of_itself(rows: int) -> None:
    layout = PromptLayout.of([(KIND.SYSTEM, SYSTEM), (KIND.SYSTEM, OTHER), (KIND.CHUNK, CHUNK)])
    plan = BlendPlan.of(layout, (Reuse.FRESH,) * 3, 0.0)
    runner, bench, config = new_runner(), Bench(MODEL), MODEL.config
    room = layout.num_tokens + len(CHUNK)
    runner.start(SequenceSpec("r", plan, PlainSelector(), room, captures=(1, 2), contrast=1, echo=True))
    assert finish(runner, rows=rows).status == "prefilled"
    warm, plain = bench.payloads((*SYSTEM, *OTHER), CHUNK), bench.payloads(SYSTEM, CHUNK)
    echo = bench.payloads((*SYSTEM, *OTHER, *CHUNK), CHUNK)
    wanted = contrast(warm, plain, config.num_kv_heads, config.head_dim, MODEL.dtype, echo=echo)
    for got, want in zip(runner.payloads("r", 2), wanted, strict=True):
        floats = [torch.frombuffer(payload, dtype=torch.float32) for payload in (got, want)]
        torch.testing.assert_close(*floats, rtol=1e-3, atol=1e-5)


def test_what_stands_before_a_contrasted_chunk_is_captured_as_ever() -> None:
    runner, _ = stored_twice()
    for got, want in zip(runner.payloads("r", 1), Bench(MODEL).payloads(SYSTEM, OTHER), strict=True):
        floats = [torch.frombuffer(payload, dtype=torch.float32) for payload in (got, want)]
        torch.testing.assert_close(*floats, rtol=1e-4, atol=1e-5)


def test_the_figures_of_a_contrast_are_those_of_its_prompt() -> None:
    _, result = stored_twice()
    assert result.figures is not None
    assert result.figures.tokens_fresh == len(SYSTEM) + len(OTHER) + len(CHUNK)


def test_a_cancel_between_the_two_computings_is_kept() -> None:
    layout = PromptLayout.of([(KIND.SYSTEM, SYSTEM), (KIND.SYSTEM, OTHER), (KIND.CHUNK, CHUNK)])
    plan = BlendPlan.of(layout, (Reuse.FRESH,) * 3, 0.0)
    runner = new_runner()
    runner.start(SequenceSpec("r", plan, PlainSelector(), layout.num_tokens, captures=(2,), contrast=1))
    assert runner.tick([("r", 1000, None)])[0].status == "running"
    runner.flag_cancelled("r")
    assert runner.tick([("r", 1000, None)])[0].status == "cancelled"
