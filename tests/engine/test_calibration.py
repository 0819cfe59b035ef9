"""Calibration samples: prompts made of shared chunks, every step of the ladder against a full prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_config, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.evaluation.calibration import Calibration, Sample, Unfit, calibration_questions
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.step import Step
from kvblend.engine.tokenizer import Tokenizer


def calibration(
    tokenizer: Tokenizer, template: ChatTemplate, spec: SelectorSpec, context: int = 8192, keeps: bool = True
) -> Calibration:
    model = tiny_model(replace(tiny_config(), vocab_size=tokenizer.vocab_size, context_length=context))
    questions = calibration_questions(2, 1)
    warm = tokenizer.encode("rivers and mills of the old town", special=False)
    return Calibration(Step(model, SdpaBackend()), tokenizer, template, questions, warm, spec, "warm", keeps=keeps)


def test_questions_share_chunks_in_other_orders() -> None:
    questions = calibration_questions(4, 2)
    assert len({question.documents for question in questions}) == 4
    assert len({document for question in questions for document in question.documents}) <= 12
    assert calibration_questions(4, 2) == questions


@pytest.mark.parametrize("spec", [SelectorSpec(), SelectorSpec("sensitive", residual="mean")], ids=["plain", "guided"])
@torch.inference_mode()
def test_every_step_is_compared_with_the_one_before(
    tiny_tokenizer: Tokenizer, chatml: ChatTemplate, spec: SelectorSpec
) -> None:
    pieces = list(calibration(tiny_tokenizer, chatml, spec).samples())
    found = [piece for piece in pieces if isinstance(piece, Sample)]
    steps = [(0.15, 0.0), (0.3, 0.15), (0.5, 0.15), (0.5, 0.3)]
    assert [(s.prompt, s.shown.ratio, s.shown.ratio_before) for s in found] == [(p, *s) for p in (0, 1) for s in steps]
    assert all(s.kl >= 0.0 and s.shown.change >= 0.0 and 0.0 < s.charged < 1.5 for s in found)
    assert None in pieces


@torch.inference_mode()
def test_with_everything_recomputed_nothing_is_off(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    found = [s for s in calibration(tiny_tokenizer, chatml, SelectorSpec(), keeps=False).samples((0.5, 1.0)) if s]
    assert [s.kl < 1e-9 for s in found] == [False, True, False, True]


def test_prompts_that_do_not_fit_are_refused(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    with pytest.raises(Unfit, match="the probes cannot be asked"):
        calibration(tiny_tokenizer, chatml, SelectorSpec(), context=64)
