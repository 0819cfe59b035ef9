from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import CPU, Bench, random_ids, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.capture import payload_tensors
from kvblend.engine.contrast import contrast
from kvblend.engine.evaluation.chunk_kv import ChunkKV, Payloads, Prefiller, captured
from kvblend.engine.kv import KVExhausted, SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.recommended import Conditioning
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.step import Step

MODEL = tiny_model()
SYSTEM, WARM, CHUNK = random_ids(5, 1), random_ids(30, 2), random_ids(12, 3)


def prefiller(tokens_max: int = 1 << 10) -> Prefiller:
    return Prefiller(Step(MODEL, SdpaBackend()), SlabPool(MODEL.config, tokens_max, MODEL.dtype, CPU))


def tensors(payloads: Payloads) -> torch.Tensor:
    config = MODEL.config
    layers = [payload_tensors(p, config.num_kv_heads, config.head_dim, MODEL.dtype, len(CHUNK)) for p in payloads]
    return torch.stack([torch.stack(pair) for pair in layers])


@pytest.mark.parametrize(("conditioning", "behind"), [("bare", ()), ("system", SYSTEM)])
def test_a_chunk_is_computed_behind_what_its_conditioning_says(
    conditioning: Conditioning, behind: Sequence[int]
) -> None:
    found = ChunkKV(prefiller(), SYSTEM, WARM).compute(conditioning, CHUNK)
    torch.testing.assert_close(tensors(found), tensors(Bench(MODEL).payloads(behind, CHUNK)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("system", [SYSTEM, ()])
def test_warm_is_the_contrast_of_the_unrelated_text_and_the_system_prompt(system: tuple[int, ...]) -> None:
    bench, config = Bench(MODEL), MODEL.config
    warm, plain = bench.payloads((*system, *WARM), CHUNK), bench.payloads(system, CHUNK)
    wanted = contrast(warm, plain, config.num_kv_heads, config.head_dim, MODEL.dtype)
    found = ChunkKV(prefiller(), system, WARM).compute("warm", CHUNK)
    torch.testing.assert_close(tensors(found), tensors(wanted), rtol=1e-9, atol=1e-9)
    assert [len(a) for a in found] == [len(b) for b in wanted]


def test_passages_of_the_corpus_stand_for_the_shipped_text() -> None:
    other = random_ids(20, 9)
    chunks = ChunkKV(prefiller(), SYSTEM, WARM, other)
    wanted = ChunkKV(prefiller(), SYSTEM, other).compute("warm", CHUNK)
    torch.testing.assert_close(tensors(chunks.compute("corpus", CHUNK)), tensors(wanted))
    assert not torch.equal(tensors(chunks.compute("warm", CHUNK)), tensors(wanted))


def test_without_passages_of_the_corpus_the_shipped_text_is_taken() -> None:
    chunks = ChunkKV(prefiller(), SYSTEM, WARM)
    torch.testing.assert_close(tensors(chunks.compute("corpus", CHUNK)), tensors(chunks.compute("warm", CHUNK)))


def test_without_a_system_prompt_nothing_stands_before_the_first_document() -> None:
    assert ChunkKV(prefiller(), (), WARM).system_payloads() is None


def test_what_stands_before_chunks_is_computed_once() -> None:
    chunks = ChunkKV(prefiller(), SYSTEM, WARM)
    assert chunks.system_payloads() is chunks.system_payloads()


def test_every_slot_is_given_back() -> None:
    runs = prefiller()
    ChunkKV(runs, SYSTEM, WARM).compute("warm", CHUNK)
    assert runs.pool.tokens_used == 0


def test_a_failed_start_holds_no_slots() -> None:
    runs = prefiller()
    layout = PromptLayout.of([(SegmentKind.CHUNK, CHUNK)])
    with pytest.raises(ValueError, match="must be computed fresh"):
        runs.run(BlendPlan.of(layout, [Reuse.CACHED], 0.0), PlainSelector())
    assert runs.pool.tokens_used == 0


def test_a_prompt_beyond_the_pool_is_refused() -> None:
    layout = PromptLayout.of([(SegmentKind.QUESTION, CHUNK)])
    with pytest.raises(KVExhausted):
        prefiller(0).run(BlendPlan.of(layout, [Reuse.FRESH], 0.0), PlainSelector())


def test_nothing_captured_is_said() -> None:
    layout = PromptLayout.of([(SegmentKind.QUESTION, CHUNK)])
    done = prefiller().run(BlendPlan.of(layout, [Reuse.FRESH], 0.0), PlainSelector())
    with pytest.raises(ValueError, match="nothing was captured"):
        captured(done, 0)
