"""The gate of a model: a sound one passes, and each planted fault fails the check that is there for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_files import save_llama
from tiny_models import CPU, random_ids, tiny_config, tiny_model

from kvblend.engine import precision
from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.evaluation.chunk_kv import Payloads
from kvblend.engine.evaluation.gate import GateSetting, GateUnfit, ModelGate, gate_prompts, run_gate
from kvblend.engine.evaluation.gate_report import GateReport
from kvblend.engine.evaluation.prompting import PreparedQuestion
from kvblend.engine.evaluation.questions import Question
from kvblend.engine.layout import PromptLayout, SegmentKind
from kvblend.engine.loaders.load import load_model
from kvblend.engine.precision import Precision
from kvblend.engine.rope import RopeTable
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.step import Step

ALL = ["layer0_parity", "prefix", "scattered_rows", "ratio_one", "kl_mean"]
QUESTION = Question((("", "text"),), "who?", ("someone",))
SETTING = GateSetting(SelectorSpec(), 0.15, "warm", math.inf)


def prompt(seed: int = 0, *, system: bool = True) -> PreparedQuestion:
    parts = [(SegmentKind.SYSTEM, random_ids(7, 100))] if system else []
    parts += [(SegmentKind.CHUNK, random_ids(24, 10 * seed + i)) for i in range(4)]
    parts.append((SegmentKind.QUESTION, random_ids(9, seed)))
    return PreparedQuestion(QUESTION, PromptLayout.of(parts), random_ids(3, seed + 50))


def gate(
    setting: GateSetting = SETTING,
    backend: AttentionBackend | None = None,
    through: Callable[[Payloads], Payloads] | None = None,
    prompts: int = 2,
    stored: str = "",
    **config: Any,
) -> ModelGate:
    model = tiny_model(tiny_config(**config))
    asked = [prompt(seed) for seed in range(prompts)]
    form = Precision.of_model(model, stored)
    return ModelGate(Step(model, backend or SdpaBackend()), asked, random_ids(60, 7), setting, through, form)


def failed(report: GateReport) -> list[str]:
    return [check.name for check in report.checks if not check.passed]


@pytest.mark.parametrize("conditioning", ["bare", "system", "warm"])
@pytest.mark.parametrize("selector", ["divergence", "query", "random"])
def test_a_sound_model_passes_every_check(conditioning: Any, selector: Any) -> None:
    report = run_gate(gate(GateSetting(SelectorSpec(selector=selector), 0.2, conditioning, math.inf)))
    assert [check.name for check in report.checks] == ALL
    assert failed(report) == []
    assert report.passed


def test_a_prompt_without_a_system_segment_is_judged_too() -> None:
    model = tiny_model()
    subject = ModelGate(Step(model, SdpaBackend()), [prompt(system=False)], random_ids(60, 7), SETTING)
    report = run_gate(subject)
    assert [check.name for check in report.checks] == ALL
    assert failed(report) == []


def test_divergence_above_the_limit_fails_and_names_value_and_limit() -> None:
    report = run_gate(gate(replace(SETTING, kl_max=1e-6)))
    assert failed(report) == ["kl_mean"]
    assert report.reasons[0].startswith("kl_mean: mean KL of divergence at 0.15")
    assert "at most 1e-06" in report.reasons[0]


def test_a_wrong_base_in_the_rotation_of_stored_keys_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = RopeTable(tiny_config(rope=replace(tiny_config().rope, theta=500.0)), torch.float64, CPU)
    monkeypatch.setattr(RopeTable, "span", lambda _, start, end: (wrong.cos[start:end], wrong.sin[start:end]))
    found = failed(run_gate(gate()))
    assert "layer0_parity" in found
    assert "ratio_one" in found


class CornerMask(SdpaBackend):
    """The mistake of others: the rows of a call are taken for the last positions there are."""

    def prepare(self, positions: torch.Tensor, *rest: Any, **more: Any) -> Any:
        last, rows = int(positions[-1]), positions.shape[0]
        return super().prepare(torch.arange(last + 1 - rows, last + 1), *rest, **more)


class NoMask(SdpaBackend):
    """Every row sees every key that there is."""

    def prepare(self, positions: torch.Tensor, *rest: Any, **more: Any) -> Any:
        plan = super().prepare(positions[-1:], *rest, **more)
        tile = replace(plan.tiles[0], end=positions.shape[0])
        return replace(plan, rows=positions.shape[0], tiles=(tile,))


def test_a_mask_aligned_to_the_corner_fails_where_rows_are_scattered() -> None:
    assert failed(run_gate(gate(backend=CornerMask()))) == ["scattered_rows"]


def test_a_mask_that_shows_the_future_fails_even_though_every_run_has_it() -> None:
    assert "prefix" in failed(run_gate(gate(backend=NoMask())))


def swap(first: int, second: int) -> Callable[[Payloads], Payloads]:
    def swapped(payloads: Payloads) -> Payloads:
        out = list(payloads)
        out[first], out[second] = out[second], out[first]
        return out

    return swapped


def test_a_swapped_layer_in_the_store_fails() -> None:
    assert failed(run_gate(gate(through=swap(1, 2)))) == ["prefix", "scattered_rows", "ratio_one"]


def test_a_swapped_first_layer_shows_in_its_parity() -> None:
    assert "layer0_parity" in failed(run_gate(gate(through=swap(0, 3))))


def test_numbers_that_are_none_do_not_pass() -> None:
    def spoilt(payloads: Payloads) -> Payloads:
        for payload in payloads:
            torch.frombuffer(payload, dtype=torch.float64).fill_(math.nan)
        return payloads

    report = run_gate(gate(through=spoilt))
    assert "layer0_parity" in failed(report)
    assert "kl_mean" in failed(report)


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_a_narrow_store_is_judged_by_its_own_divergence(stored: str) -> None:
    report = run_gate(gate(replace(SETTING, conditioning="system"), stored=stored))
    assert [check.name for check in report.checks] == [*ALL[:-1], "store_dtype", ALL[-1]]
    found = report.checks[-2]
    assert (found.limit, found.value > 0.0) == (1e-3, True)
    assert f"KV stored as {stored}" in found.reason
    *pieces, alone = gate(replace(SETTING, conditioning="system"), stored=stored).check_store_dtype()
    assert set(pieces) == {None}
    assert alone == found


def test_bfloat16_passes_and_a_form_that_keeps_two_bits_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(run_gate(gate(stored="bfloat16"))) == []
    monkeypatch.setattr(precision, "INT8_MAX", 1)
    poor = run_gate(gate(stored="int8"))
    assert "store_dtype" in failed(poor)
    assert any("KV stored as int8" in reason for reason in poor.reasons)


def test_a_wrong_scale_shows_in_the_parity_of_layer_0(monkeypatch: pytest.MonkeyPatch) -> None:
    quantise = precision._quantise
    monkeypatch.setattr(precision, "_quantise", lambda x, dim: (quantise(x, dim)[0], quantise(x, dim)[1] * 1.1))
    assert "layer0_parity" in failed(run_gate(gate(stored="int8")))


def test_what_is_stored_as_computed_is_not_judged_for_rounding() -> None:
    assert [check.name for check in run_gate(gate()).checks] == ALL


def test_a_warm_text_that_does_not_fit_is_left_out() -> None:
    report = run_gate(gate(context_length=120))
    assert failed(report) == []


def test_work_comes_in_pieces_and_a_closed_gate_holds_nothing() -> None:
    subject = gate()
    checks = subject.checks()
    assert [next(checks) for _ in range(5)] == [None] * 5
    assert next(checks) is not None
    assert subject._prefiller.pool.tokens_used > 0
    checks.close()  # type: ignore[attr-defined]
    assert subject._prefiller.pool.tokens_used == 0


def test_built_in_probes_become_prompts_or_do_not_fit(tmp_path: Any) -> None:
    loaded = load_model(save_llama(tmp_path, max_position_embeddings=8192), torch.float32, CPU)
    prompts = gate_prompts(loaded.tokenizer, loaded.template, 8192)
    assert len(prompts) == 2
    assert all(len(list(each.layout.chunks())) == 6 for each in prompts)
    with pytest.raises(GateUnfit, match="context of 300"):
        gate_prompts(loaded.tokenizer, loaded.template, 300)
    with pytest.raises(GateUnfit, match="no probes"):
        gate_prompts(loaded.tokenizer, loaded.template, 8192, [])
