"""The embedded model through the real step: greedy tokens of transformers, and ratio 1.0 against full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf_files import reference_from_gguf
from tiny_models import Bench, DictSource, Run

from kvblend.engine.layout import PromptLayout, Reuse, SegmentKind
from kvblend.engine.loaders.load import LoadedModel, load_model
from kvblend.engine.prompt import PromptDocument, build_prompt
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.engine.step import WorkItem
from kvblend.samples import QUESTION, SYSTEM, load

TOKENS = 32


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def layout(loaded: LoadedModel) -> PromptLayout:
    documents = [PromptDocument(sample.title, sample.text[:240]) for sample in load()[:3]]
    return build_prompt(loaded.tokenizer, loaded.template, SYSTEM, [("user", QUESTION)], documents)


@torch.inference_mode()
def decode(bench: Bench, run: Run, count: int) -> list[int]:
    tokens = [int(run.logits.argmax())]
    while len(tokens) < count:
        run.sequence.append_token(tokens[-1])
        hidden = bench.step.run([WorkItem(run.sequence, 1)])[0].hidden
        assert hidden is not None
        tokens.append(int(bench.model.logits(hidden[None])[0].argmax()))
    return tokens


@torch.inference_mode()
def reference_tokens(path: Path, ids: Sequence[int], count: int) -> list[int]:
    model = reference_from_gguf(path)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    batch = torch.tensor([ids])
    out = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, len(ids) :]]


def test_greedy_tokens_equal_those_of_transformers(
    loaded: LoadedModel, layout: PromptLayout, smollm2_path: Path
) -> None:
    bench = Bench(loaded.model)
    full = bench.finish(bench.start(layout, [Reuse.FRESH] * 5, 0.0, DivergenceSelector(), extra=TOKENS))
    assert decode(bench, full, TOKENS) == reference_tokens(smollm2_path, layout.token_ids, TOKENS)


@pytest.mark.parametrize("name", ["divergence", "query"])
def test_ratio_one_equals_full_prefill(loaded: LoadedModel, layout: PromptLayout, name: str) -> None:
    bench = Bench(loaded.model)
    system = layout.segments[0].token_ids
    chunks = [segment for segment in layout.segments if segment.kind is SegmentKind.CHUNK]
    payloads = {0: bench.payloads((), system)}
    payloads.update({chunk.start: bench.payloads(system, chunk.token_ids) for chunk in chunks})
    selector = DivergenceSelector() if name == "divergence" else QuerySelector()
    reuse = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.CACHED, Reuse.FRESH]
    got = bench.finish(bench.start(layout, reuse, 1.0, selector, DictSource(payloads), extra=TOKENS))
    want = bench.finish(bench.start(layout, [Reuse.FRESH] * 5, 0.0, DivergenceSelector(), extra=TOKENS))
    assert float((got.logits - want.logits).abs().max() / want.logits.abs().max()) < 1e-4
    for ours, theirs in ((got.k, want.k), (got.v, want.v)):
        worst = (ours - theirs).abs().amax((1, 2, 3)) / theirs.abs().amax((1, 2, 3))
        assert float(worst.max()) < 1e-4
    assert decode(bench, got, TOKENS) == decode(bench, want, TOKENS)
