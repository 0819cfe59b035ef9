"""Log probabilities of a whole answer, from the logits of a tiny model to the tokens' names."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from model_files import reference_logits

from kvblend.engine.assembly import Engine, assemble_engine
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.logprobs import TokenLogprob
from kvblend.engine.output import OutputText
from kvblend.engine.runner import SequenceSpec
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.plain import PlainSelector

PROMPT = "the river and the mill were old"
COUNT = 12


@pytest.fixture(scope="module")
def engine(llama_dir: Path) -> Engine:
    return assemble_engine(llama_dir, "float32", "cpu", "sdpa", 512, 0)


def run(engine: Engine, plan: SamplingPlan) -> tuple[tuple[int, ...], list[int], list[TokenLogprob], str]:
    """Prompt ids, output ids, log probabilities and text of one answer."""
    tokenizer = engine.tokenizer
    ids = tuple(tokenizer.encode(PROMPT, special=False))
    layout = PromptLayout.of([(SegmentKind.QUESTION, ids)])
    output = OutputText(tokenizer.stream(), (), (), COUNT, vocabulary=tokenizer)
    made = BlendPlan.of(layout, [Reuse.FRESH], 0.0)
    engine.runner.start(
        SequenceSpec("r", made, PlainSelector(), len(ids) + COUNT, sampling=plan, output=output),
    )
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    text = ""
    while len(tokens) < COUNT:
        (result,) = engine.runner.tick([("r", 1000, None)])
        if result.status == "sampled":
            tokens.append(result.token_id)
            text += result.text
            if result.logprob is not None:
                logprobs.append(result.logprob)
    engine.runner.free("r")
    return ids, tokens, logprobs, text


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_they_are_those_of_transformers(engine: Engine, llama_dir: Path, temperature: float) -> None:
    plan = SamplingPlan(temperature, 1.0, 5, repetition_penalty=1.5, logprobs=4)
    ids, tokens, logprobs, _ = run(engine, plan)
    theirs = reference_logits(llama_dir, [*ids, *tokens]).double().log_softmax(-1)
    for step, (token, ours) in enumerate(zip(tokens, logprobs, strict=True)):
        row = theirs[len(ids) - 1 + step]
        assert ours.token_id == token
        assert ours.logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert [one.logprob for one in ours.top] == pytest.approx(row.topk(4).values.tolist(), abs=2e-4)


def test_penalties_change_the_choice_and_not_what_is_told(engine: Engine, llama_dir: Path) -> None:
    ids, tokens, logprobs, _ = run(engine, SamplingPlan(0.0, 1.0, 0, repetition_penalty=3.0, logprobs=1))
    theirs = reference_logits(llama_dir, [*ids, *tokens])
    for step, token in enumerate(tokens):
        row = theirs[len(ids) - 1 + step].clone()
        for seen in {*ids, *tokens[:step]}:
            row[seen] = row[seen] / 3.0 if row[seen] > 0 else row[seen] * 3.0
        assert token == int(row.argmax())
    # otherwise there was nothing to see
    assert any(one.top[0].token_id != one.token_id for one in logprobs)


def test_bytes_join_to_the_text_and_offsets_point_into_it(engine: Engine) -> None:
    _, tokens, logprobs, text = run(engine, SamplingPlan(1.3, 1.0, 8, logprobs=0))
    data = [one.bytes or b"" for one in logprobs]
    assert b"".join(data).decode("utf-8", "replace") == text == engine.tokenizer.decode(tokens)
    for place, one in enumerate(logprobs):
        # a token that begins within a character stands where the character does
        until = b"".join(data[:place]) + data[place][:1]
        assert one.offset == len(until.decode("utf-8", "replace")) - 1
        if "\\" not in one.token:
            assert text[one.offset :].startswith(one.token)


def test_without_asking_there_are_none(engine: Engine) -> None:
    assert run(engine, SamplingPlan(0.0, 1.0, 0))[2] == []


def test_the_whole_vocabulary_has_the_probability_one(engine: Engine, llama_dir: Path) -> None:
    ids, tokens, logprobs, _ = run(engine, SamplingPlan(0.0, 1.0, 0, logprobs=20))
    row = reference_logits(llama_dir, [*ids, *tokens])[len(ids) - 1].double()
    rest = torch.ones(row.shape[0], dtype=torch.bool)
    rest[[one.token_id for one in logprobs[0].top]] = False
    others = float((row - row.logsumexp(0)).exp()[rest].sum())
    assert others + math.fsum(math.exp(one.logprob) for one in logprobs[0].top) == pytest.approx(1.0, abs=1e-4)
