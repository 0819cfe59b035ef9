from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CPU, Bench, random_ids, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.evaluation.chunk_kv import Prefiller
from kvblend.engine.evaluation.forcing import Prefilled
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.step import Step, WorkItem

MODEL = tiny_model()
LAYOUT = PromptLayout.of([(SegmentKind.CHUNK, random_ids(20, 1)), (SegmentKind.QUESTION, random_ids(9, 2))])
TOKENS = random_ids(6, 3)


class CountingStep(Step):
    runs = 0

    def run(self, items: Sequence[WorkItem]) -> list[object]:  # type: ignore[override]
        self.runs += 1
        return super().run(items)  # type: ignore[return-value]


def prefill(extra: int = 16) -> Prefilled:
    step = CountingStep(MODEL, SdpaBackend())
    pool = SlabPool(MODEL.config, 1 << 10, MODEL.dtype, CPU)
    plan = BlendPlan.of(LAYOUT, [Reuse.FRESH] * 2, 0.0)
    return Prefiller(step, pool).run(plan, PlainSelector(), tokens_extra=extra)


def one_by_one(tokens: Sequence[int]) -> torch.Tensor:
    """Logits where each token stands, one row a step, as a server decodes."""
    bench = Bench(MODEL)
    sequence = bench.start(LAYOUT, [Reuse.FRESH] * 2, 0.0, PlainSelector())
    rows = [bench.finish(sequence).logits]
    for token in tokens[:-1]:
        sequence.append_token(token)
        rows.append(bench.finish(sequence).logits)
    return torch.stack(rows)


def greedy(count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(one_by_one([*tokens, 0])[-1].argmax()))
    return tokens


def test_forced_rows_have_the_logits_of_decoding_one_by_one() -> None:
    torch.testing.assert_close(prefill().force(TOKENS), one_by_one(TOKENS), rtol=1e-9, atol=1e-9)


def test_one_token_needs_no_pass() -> None:
    done = prefill()
    assert torch.equal(done.force(TOKENS[:1])[0], done.first)


def test_the_prompt_can_be_forced_again() -> None:
    done = prefill()
    done.force(random_ids(9, 8))
    torch.testing.assert_close(done.force(TOKENS), one_by_one(TOKENS), rtol=1e-9, atol=1e-9)


def test_greedy_text_is_that_of_decoding_one_by_one() -> None:
    assert prefill().continue_greedily(7, ()) == greedy(7)


@given(st.lists(st.integers(0, 7), max_size=3), st.integers(0, 96))
def test_drafts_do_not_change_the_text(cuts: list[int], wrong: int) -> None:
    text = greedy(7)
    drafts = [[*text[:cut], wrong, *text[cut + 1 :]] for cut in cuts]
    assert prefill().continue_greedily(7, (), drafts) == text


def test_a_right_draft_saves_steps() -> None:
    done = prefill()
    assert isinstance(done.step, CountingStep)
    before = done.step.runs
    done.continue_greedily(7, (), [greedy(7)])
    assert done.step.runs - before == 1


@pytest.mark.parametrize("drafted", [False, True])
def test_text_ends_with_the_first_end_token(drafted: bool) -> None:
    text = greedy(7)
    end = text[3]
    drafts = [text] if drafted else []
    assert prefill().continue_greedily(7, {end}, drafts) == text[: text.index(end) + 1]


@pytest.mark.parametrize("wrong_at", [0, 2, 6, None])
def test_following_is_forcing_and_writing_at_once(wrong_at: int | None) -> None:
    text = greedy(7)
    forced = [(token + 1) % 97 if index == wrong_at else token for index, token in enumerate(text)]
    logits, found = prefill().follow(forced, 7, ())
    assert found == text
    torch.testing.assert_close(logits, one_by_one(forced), rtol=1e-9, atol=1e-9)


def test_followed_text_ends_with_the_first_end_token() -> None:
    text = greedy(7)
    assert prefill().follow(text, 7, {text[2]})[1] == text[: text.index(text[2]) + 1]


def test_rewinding_into_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_tokens is 28; there are 29\.\.29"):
        prefill().state.rewind(28)
