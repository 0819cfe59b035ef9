"""The model device goes through layers as the engine does: passes, slices, stalls, layer limits."""

from __future__ import annotations

import pytest
from simulation.device import Device, DeviceCosts, Running, passes_of

from kvblend.actors.core import events as ev
from kvblend.actors.messages import BlendOptions, Sampling
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind

LAYERS = 5
LAYOUT = PromptLayout.of(
    [(SegmentKind.SYSTEM, (1,) * 10), (SegmentKind.CHUNK, (2,) * 100), (SegmentKind.QUESTION, (3,) * 8)]
)
BLEND = BlendPlan.of(LAYOUT, [Reuse.EXACT, Reuse.CACHED, Reuse.FRESH], 0.2)
FULL = BlendPlan.of(LAYOUT, [Reuse.FRESH] * 3, 0.0)


def job(name: str = "r") -> ev.Job:
    keys = tuple(ev.SegmentKeys() for _ in LAYOUT.segments)
    return ev.Job(name, "generate", LAYOUT, keys, "blend", 0.2, BlendOptions(), Sampling(max_tokens=2))


def device(plan: BlendPlan, loaded: int = LAYERS) -> Device:
    out = Device(DeviceCosts(1.0, 0.1, 0.0, 0.0), LAYERS)
    out.running["r"] = Running.start(ev.StartSequence(job(), plan, ()), LAYERS)
    out.running["r"].loaded = loaded
    return out


def test_a_blend_computes_all_cached_rows_in_its_first_layers_and_its_share_behind_them() -> None:
    first, second = passes_of(job(), BLEND, LAYERS)
    assert (first.start, first.stop, first.rows) == (0, 2, 108)
    assert (second.start, second.stop, second.rows) == (2, 5, 28)


def test_a_full_prefill_is_one_pass_whose_rows_see_half_of_it_on_average() -> None:
    (only,) = passes_of(job(), FULL, LAYERS)
    assert (only.start, only.stop, only.rows, only.keys) == (0, LAYERS, 118, 59)


def test_a_step_takes_a_fixed_time_and_one_per_row_and_layer() -> None:
    seconds, (result,) = device(BLEND).run([ev.StepItem("r", 1000)])
    work = 2 * 108 + 3 * 28
    assert (result.status, result.row_layers) == ("sampled", work)
    assert seconds == pytest.approx(1.0 + 0.1 * work)


def test_the_charged_ratio_is_that_of_the_engine() -> None:
    _, (result,) = device(BLEND).run([ev.StepItem("r", 1000)])
    assert result.prefill is not None
    assert result.prefill.charged_ratio == pytest.approx((2 + (LAYERS - 2) * 0.2) / LAYERS)
    assert (result.prefill.tokens_reused, result.prefill.tokens_recomputed, result.prefill.tokens_fresh) == (90, 20, 8)


def test_a_layer_that_is_not_loaded_stalls_and_is_gone_on_from() -> None:
    slow = device(BLEND, loaded=1)
    _, (stalled,) = slow.run([ev.StepItem("r", 1000)])
    assert (stalled.status, stalled.row_layers, slow.running["r"].waits_for) == ("stalled", 108, 1)
    slow.running["r"].loaded = LAYERS
    _, (done,) = slow.run([ev.StepItem("r", 1000)])
    assert (done.status, done.row_layers) == ("sampled", 108 + 3 * 28)


def test_rows_are_cut_into_slices_of_what_a_step_may_take() -> None:
    plain = device(FULL)
    results = [plain.run([ev.StepItem("r", 50)])[1][0] for _ in range(3)]
    assert [(r.status, r.rows) for r in results] == [("running", 50), ("running", 50), ("sampled", 18)]


def test_layers_are_cut_too() -> None:
    plain = device(FULL)
    results = [plain.run([ev.StepItem("r", 1000, 2)])[1][0] for _ in range(3)]
    assert [(r.status, r.row_layers) for r in results] == [("running", 236), ("running", 236), ("sampled", 118)]


def test_an_answer_goes_on_by_one_row() -> None:
    plain = device(FULL)
    plain.run([ev.StepItem("r", 1000)])
    seconds, (token,) = plain.run([ev.StepItem("r", 1)])
    assert (token.status, token.rows) == ("sampled", 1)
    assert seconds == pytest.approx(1.0 + 0.1 * LAYERS)


def test_a_cancelled_one_is_left() -> None:
    plain = device(FULL)
    plain.running["r"].cancelled = True
    assert plain.run([ev.StepItem("r", 1000)])[1][0].status == "cancelled"
