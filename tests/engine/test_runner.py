"""Sequences of one device: slots, ticks, sampling, captured KV."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import CPU, Bench, DictSource, random_ids, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.kv import PAGE_TOKENS, KVExhausted, SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.output import OutputText
from kvblend.engine.precision import Precision
from kvblend.engine.runner import Runner, SequenceSpec, TickResult
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.plain import PlainSelector

KIND = SegmentKind
MODEL = tiny_model(dtype=torch.float32)
SYSTEM, CHUNK, OTHER, QUESTION = (random_ids(n, n) for n in (6, 15, 12, 5))
FRESH = (Reuse.FRESH,) * 4
LAYOUT = PromptLayout.of([(KIND.SYSTEM, SYSTEM), (KIND.CHUNK, CHUNK), (KIND.CHUNK, OTHER), (KIND.QUESTION, QUESTION)])
GREEDY = SamplingPlan(0.0, 1.0, 0)


class Numbers:
    """A detokeniser that writes ids as numbers."""

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


def new_runner(tokens_max: int = 256) -> Runner:
    return Runner(MODEL, SdpaBackend(), SlabPool(MODEL.config, tokens_max, MODEL.dtype, CPU))


def spec(
    name: str = "r",
    marks: Sequence[Reuse] = FRESH,
    tokens: int = 4,
    captures: tuple[int, ...] = (),
    source: DictSource | None = None,
    ratio: float = 1.0,
    store: bool = False,
) -> SequenceSpec:
    plan = BlendPlan.of(LAYOUT, marks, ratio)
    selector = DivergenceSelector() if plan.budget else PlainSelector()
    size = LAYOUT.num_tokens + tokens
    if store:
        return SequenceSpec(name, plan, selector, size, source, captures)
    output = OutputText(Numbers(), (), (), tokens)
    return SequenceSpec(name, plan, selector, size, source, captures, GREEDY, output)


def tick(runner: Runner, *names: str, rows: int = 1000) -> list[TickResult]:
    return runner.tick([(name, rows, None) for name in names])


def finish(runner: Runner, name: str = "r", rows: int = 1000) -> TickResult:
    """Tick until the prompt is done."""
    for _ in range(200):
        (result,) = tick(runner, name, rows=rows)
        if result.status != "running":
            return result
    raise AssertionError("the prompt does not end")


def greedy(count: int) -> list[int]:
    runner = new_runner()
    runner.start(spec(tokens=count))
    return [finish(runner).token_id, *(tick(runner, "r")[0].token_id for _ in range(count - 1))]


def test_a_prompt_gives_its_first_token_with_the_figures() -> None:
    runner = new_runner()
    runner.start(spec())
    result = finish(runner)
    assert (result.status, result.text) == ("sampled", f"{result.token_id} ")
    assert result.figures is not None
    assert (result.figures.tokens_fresh, result.figures.charged_ratio) == (LAYOUT.num_tokens, 1.0)


def test_the_first_token_is_that_of_the_largest_logit() -> None:
    assert greedy(1) == [int(Bench(MODEL).full(LAYOUT).logits.argmax())]


def test_the_figures_come_once() -> None:
    runner = new_runner()
    runner.start(spec())
    finish(runner)
    assert tick(runner, "r")[0].figures is None


def test_a_prompt_in_slices_gives_the_same_tokens() -> None:
    runner = new_runner()
    runner.start(spec(tokens=3))
    tokens = [finish(runner, rows=7).token_id, tick(runner, "r")[0].token_id, tick(runner, "r")[0].token_id]
    assert tokens == greedy(3)


def test_packed_sequences_give_the_tokens_of_single_ones() -> None:
    runner = new_runner()
    runner.start(spec("a", tokens=3))
    first = finish(runner, "a").token_id
    runner.start(spec("b", tokens=3))
    second, begun = tick(runner, "a", "b")
    third, following = tick(runner, "a", "b")
    assert [first, second.token_id, third.token_id] == greedy(3)
    assert [begun.token_id, following.token_id] == greedy(2)


def test_the_last_token_needs_no_slot() -> None:
    runner = new_runner()
    runner.start(spec(tokens=PAGE_TOKENS - LAYOUT.num_tokens % PAGE_TOKENS))
    count = runner.pool.tokens_used - LAYOUT.num_tokens
    finish(runner)
    assert [tick(runner, "r")[0].status for _ in range(count - 1)] == ["sampled"] * (count - 1)


def test_a_job_without_output_ends_with_its_prompt() -> None:
    runner = new_runner()
    runner.start(spec(store=True, tokens=0))
    result = finish(runner)
    assert result.status == "prefilled"
    assert result.figures is not None


def test_captured_kv_blends_into_another_prompt_as_if_computed_there() -> None:
    runner = new_runner()
    runner.start(spec("keep", captures=(0, 1), store=True))
    finish(runner, "keep")
    stored = {LAYOUT.segments[index].start: runner.payloads("keep", index) for index in (0, 1)}
    runner.free("keep")
    marks = (Reuse.EXACT, Reuse.EXACT, Reuse.FRESH, Reuse.FRESH)
    runner.start(spec(marks=marks, source=DictSource(stored), tokens=2))
    result = finish(runner)
    assert [result.token_id, tick(runner, "r")[0].token_id] == greedy(2)
    assert result.figures is not None
    assert result.figures.tokens_reused == len(SYSTEM) + len(CHUNK)


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_captured_kv_comes_in_its_stored_form_and_is_loaded_in_it(stored: str) -> None:
    wide, narrow = new_runner(), new_runner()
    narrow.precision = Precision.of_model(MODEL, stored)
    for runner in (wide, narrow):
        runner.start(spec(captures=(0, 1), store=True))
        finish(runner)
    whole = {index: wide.payloads("r", index) for index in (0, 1)}
    kept = {index: narrow.payloads("r", index) for index in (0, 1)}
    for index, count in ((0, len(SYSTEM)), (1, len(CHUNK))):
        assert [bytes(layer) for layer in kept[index]] == [
            bytes(narrow.precision.encode(layer, count)) for layer in whole[index]
        ]
    starts = [segment.start for segment in LAYOUT.segments]
    marks = (Reuse.EXACT, Reuse.EXACT, Reuse.FRESH, Reuse.FRESH)
    source = DictSource({starts[index]: layers for index, layers in kept.items()})
    narrow.start(spec("next", marks, source=source))
    assert finish(narrow, "next").token_id == greedy(1)[0]


def test_a_prompt_cut_by_layers_gives_the_same_token_and_says_what_each_tick_computed() -> None:
    runner = new_runner()
    runner.start(spec())
    done = [runner.tick([("r", 1000, 3)])[0] for _ in range(2)]
    assert [(result.status, result.row_layers) for result in done] == [
        ("running", 3 * LAYOUT.num_tokens),
        ("sampled", (MODEL.num_layers - 3) * LAYOUT.num_tokens),
    ]
    assert done[-1].token_id == greedy(1)[0]


def test_a_layer_that_is_not_there_stalls_by_number() -> None:
    runner = new_runner()
    marks = (Reuse.EXACT, Reuse.FRESH, Reuse.FRESH, Reuse.FRESH)
    runner.start(spec(marks=marks, source=DictSource({}, ready=2)))
    (result,) = tick(runner, "r")
    assert (result.status, result.layer) == ("stalled", 2)


def test_a_flagged_sequence_is_left() -> None:
    runner = new_runner()
    runner.start(spec())
    runner.flag_cancelled("r")
    assert tick(runner, "r")[0].status == "cancelled"


def test_flags_and_ticks_of_strangers_are_ignored() -> None:
    runner = new_runner()
    runner.flag_cancelled("x")
    runner.free("x")
    assert tick(runner, "x") == []


def test_free_gives_the_slots_back() -> None:
    runner = new_runner()
    runner.start(spec())
    assert runner.pool.tokens_used > 0
    runner.free("r")
    assert (runner.pool.tokens_used, list(runner.request_ids)) == (0, [])


def test_what_does_not_fit_is_refused_and_holds_nothing() -> None:
    runner = new_runner(tokens_max=32)
    with pytest.raises(KVExhausted):
        runner.start(spec())
    assert runner.pool.tokens_used == 0


def test_a_plan_that_computes_nothing_is_refused_and_holds_nothing() -> None:
    runner = new_runner()
    with pytest.raises(ValueError, match="last segment"):
        runner.start(spec(marks=(Reuse.EXACT,) * 4))
    assert runner.pool.tokens_used == 0


def test_a_name_runs_once_at_a_time() -> None:
    runner = new_runner()
    runner.start(spec())
    with pytest.raises(ValueError, match="running already"):
        runner.start(spec())


def test_payloads_of_who_captures_nothing_are_refused() -> None:
    runner = new_runner()
    runner.start(spec())
    with pytest.raises(ValueError, match="nothing of r"):
        runner.payloads("r", 1)


def test_bad_logits_fail_their_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, (expected,) = new_runner(), greedy(1)
    runner.start(spec("good", tokens=2))
    runner.start(spec("bad", tokens=2))
    real = MODEL.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out = real(hidden)
        out[1] = float("nan")
        return out

    monkeypatch.setattr(runner.model, "logits", logits)
    good, bad = tick(runner, "good", "bad")
    assert (good.status, good.token_id) == ("sampled", expected)
    assert (bad.status, bad.error) == ("failed", "logits of row 0 are NaN")
