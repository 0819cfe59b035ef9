from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from tiny_models import Bench, DictSource, tiny_config, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.conditioning import warm_ids
from kvblend.engine.contrast import contrast
from kvblend.engine.evaluation.chunk_kv import ChunkKV, Payloads
from kvblend.engine.evaluation.examiner import CONTINUATION_TOKENS, Examiner
from kvblend.engine.evaluation.methods import BASELINE, FULL, Run, plan_runs
from kvblend.engine.evaluation.metrics import kl_per_position
from kvblend.engine.evaluation.prompting import PreparedQuestion
from kvblend.engine.evaluation.questions import BadData, Question
from kvblend.engine.evaluation.results import QuestionResult
from kvblend.engine.layout import Reuse
from kvblend.engine.loaders.load import LoadedModel
from kvblend.engine.recommended import Conditioning
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.tokenizer import Tokenizer

MODEL = tiny_model(tiny_config(vocab_size=320, context_length=8192))
DOCUMENTS = (("Mill", "The mill by the river."), ("Town", "The town is old."), ("", "The wheel turned all night."))
QUESTION = Question(DOCUMENTS, "What turned?", ("the wheel",))


@pytest.fixture
def loaded(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> LoadedModel:
    return LoadedModel(MODEL, tiny_tokenizer, chatml, "fingerprint")


def examine(loaded: LoadedModel, runs: Sequence[Run], question: Question = QUESTION) -> QuestionResult:
    ticks = itertools.count()
    examiner = Examiner(loaded, SdpaBackend(), lambda: 0.25 * next(ticks))
    return examiner.examine(examiner.prepare([question], runs)[0], 5, runs)


def prepare(loaded: LoadedModel) -> PreparedQuestion:
    return Examiner(loaded, SdpaBackend(), lambda: 0.0).prepare([QUESTION], [])[0]


def expected_kl(loaded: LoadedModel, run: Run) -> list[float]:
    """The same by the book: chunks behind their conditioning, a blend, then token by token."""
    prepared, bench = prepare(loaded), Bench(MODEL)
    segments = prepared.layout.segments
    system = segments[0].token_ids
    warm = warm_ids(loaded.tokenizer, loaded.model.config.context_length)
    assert warm
    behind = () if run.conditioning == "bare" else system
    payloads = {0: bench.payloads((), system), segments[1].start: bench.payloads(system, segments[1].token_ids)}
    for segment in segments[2:4]:
        payloads[segment.start] = bench.payloads(behind, segment.token_ids)
        if run.conditioning == "warm":
            config, longer = MODEL.config, bench.payloads((*system, *warm), segment.token_ids)
            shape = (config.num_kv_heads, config.head_dim, MODEL.dtype)
            echo = bench.payloads((*system, *warm, *segment.token_ids), segment.token_ids)
            payloads[segment.start] = contrast(longer, payloads[segment.start], *shape, echo=echo)
    marks = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.CACHED, Reuse.FRESH]
    selector = build_selector(run.spec) if run.spec else PlainSelector()
    blend = bench.start(prepared.layout, marks, run.plan_ratio, selector, DictSource(payloads), extra=40)
    full = bench.start(prepared.layout, [Reuse.FRESH] * 5, 0.0, PlainSelector(), extra=40)
    rows = []
    for sequence in (full, blend):
        logits = [bench.finish(sequence).logits]
        for token in prepared.gold[:-1]:
            sequence.append_token(token)
            logits.append(bench.finish(sequence).logits)
        rows.append(torch.stack(logits))
    return kl_per_position(*rows)


@pytest.mark.parametrize(
    "method", ["reuse", "warm:reuse", "bare:query", "divergence", "warm:query,residual=mean", "warm:sensitive"]
)
def test_kl_is_that_of_the_blend_done_by_the_book(loaded: LoadedModel, method: str) -> None:
    (run,) = plan_runs([method], [0.2])
    found = examine(loaded, [run]).find(run.method, run.ratio)
    assert found.kl == pytest.approx(expected_kl(loaded, run), rel=1e-6, abs=1e-9)
    assert max(found.kl) > 1e-4


def test_full_prefill_and_the_baseline_are_always_there(loaded: LoadedModel) -> None:
    result = examine(loaded, plan_runs(["query"], [0.1]))
    assert [(run.method, run.ratio) for run in result.runs] == [("full", 1.0), ("reuse", 0.0), ("query", 0.1)]
    assert result.index == 5


def test_full_prefill_agrees_with_itself(loaded: LoadedModel) -> None:
    full = examine(loaded, [FULL]).find("full", 1.0)
    assert (max(full.kl), max(full.kl_cont), full.top1, full.charged_ratio) == (0.0, 0.0, 1.0, 1.0)
    assert full.nll == full.nll_full


def test_at_ratio_1_nothing_is_lost(loaded: LoadedModel) -> None:
    result = examine(loaded, plan_runs(["warm:query"], [1.0]))
    full, blend = result.find("full", 1.0), result.find("warm:query", 1.0)
    assert max(*blend.kl, *blend.kl_cont) < 1e-9
    assert (blend.answer, blend.first_divergence) == (full.answer, len(full.kl_cont))
    assert blend.nll == pytest.approx(full.nll)


def test_the_continuation_has_16_positions_or_ends_with_the_text(loaded: LoadedModel) -> None:
    full = examine(loaded, [FULL]).find("full", 1.0)
    assert 1 <= len(full.kl_cont) <= CONTINUATION_TOKENS == 16


def test_plain_reuse_is_charged_nothing(loaded: LoadedModel) -> None:
    assert examine(loaded, [BASELINE]).find("reuse", 0.0).charged_ratio == 0.0


def test_time_is_that_of_the_prefill_by_the_clock(loaded: LoadedModel) -> None:
    assert [run.ttft_ms for run in examine(loaded, [BASELINE]).runs] == [250.0, 250.0]


def test_only_conditionings_that_are_needed_are_computed(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Conditioning] = []
    compute = ChunkKV.compute

    def spy(self: ChunkKV, conditioning: Conditioning, ids: Sequence[int]) -> Payloads:
        computed.append(conditioning)
        return compute(self, conditioning, ids)

    monkeypatch.setattr(ChunkKV, "compute", spy)
    examine(loaded, plan_runs(["bare:query", "bare:random", "divergence"], [0.1, 0.2]))
    # the first of three chunks is the exact one, captured from the full prefill
    assert sorted(computed) == ["bare", "bare", "system", "system"]


def test_runs_that_compute_the_same_are_computed_once(loaded: LoadedModel) -> None:
    result = examine(loaded, plan_runs(["divergence", "system:reuse", "query"], [0.0]))
    assert [run.method for run in result.runs] == ["full", "reuse", "divergence", "system:reuse", "query"]
    assert len({id(run.kl) for run in result.runs[1:]}) == 1


def test_one_document_alone_is_exact(loaded: LoadedModel) -> None:
    result = examine(loaded, [BASELINE], Question(DOCUMENTS[:1], "What?", ("the mill",)))
    assert max(result.find("reuse", 0.0).kl) < 1e-9


def test_a_document_that_does_not_fit_behind_the_unrelated_text_is_named(
    tiny_tokenizer: Tokenizer, chatml: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvblend.engine.evaluation.examiner.warm_ids", lambda *_: (5,) * 790)
    model = tiny_model(tiny_config(vocab_size=320, context_length=800))
    examiner = Examiner(LoadedModel(model, tiny_tokenizer, chatml, ""), SdpaBackend(), lambda: 0.0)
    examiner.prepare([QUESTION], plan_runs(["query"]))
    with pytest.raises(BadData, match=r"data\[0\] has a document of \d+ tokens; behind the \d+ tokens of warm"):
        examiner.prepare([QUESTION], plan_runs(["warm:query"]))


def test_estimates_need_no_full_prefill_and_fit_a_file(loaded: LoadedModel) -> None:
    estimates = examine(loaded, plan_runs(["query"], [0.1])).find("query", 0.1).estimates
    assert estimates["budget"] >= 1
    assert len(estimates["first_tokens"]) == len(estimates["first_log_probabilities"]) == 16
    assert estimates["parity_error"] < 1e-9


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_blends_of_a_narrow_store_are_compared_with_those_of_a_wide_one(loaded: LoadedModel, stored: str) -> None:
    runs = plan_runs(["full", "reuse", "divergence", "warm:sensitive"], [0.3])
    examiner = Examiner(loaded, SdpaBackend(), lambda: 0.0, store_dtype=stored)
    found = examiner.examine(examiner.prepare([QUESTION], runs)[0], 0, runs)
    plain = examine(loaded, runs)
    for run in runs:
        narrow, wide = found.find(run.method, run.ratio), plain.find(run.method, run.ratio)
        assert wide.kl_store == ()
        if run == FULL:
            assert narrow.kl_store == ()
            assert narrow.kl == wide.kl
        else:
            assert len(narrow.kl_store) == len(narrow.kl)
            assert 0.0 < max(narrow.kl_store) < 0.05
            assert narrow.kl != wide.kl
    assert examiner._prefiller.pool.tokens_used == 0
