from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tiny_models import CPU, Bench, random_ids, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.capture import payload_tensors
from kvblend.engine.contrast import contrast
from kvblend.engine.evaluation.chunk_kv import ChunkKV, Payloads, Prefiller, RecentForms, captured
from kvblend.engine.kv import KVExhausted, SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.precision import Precision
from kvblend.engine.recommended import Conditioning
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.step import Step

MODEL = tiny_model()
SYSTEM, WARM, CHUNK = random_ids(5, 1), random_ids(30, 2), random_ids(12, 3)


def prefiller(tokens_max: int = 1 << 10, stored: str = "") -> Prefiller:
    pool = SlabPool(MODEL.config, tokens_max, MODEL.dtype, CPU)
    return Prefiller(Step(MODEL, SdpaBackend()), pool, Precision.of_model(MODEL, stored))


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
    echo = bench.payloads((*system, *WARM, *CHUNK), CHUNK)
    wanted = contrast(warm, plain, config.num_kv_heads, config.head_dim, MODEL.dtype, echo=echo)
    found = ChunkKV(prefiller(), system, WARM).compute("warm", CHUNK)
    torch.testing.assert_close(tensors(found), tensors(wanted), rtol=1e-9, atol=1e-9)
    assert [len(a) for a in found] == [len(b) for b in wanted]
    behind = 4 * len(CHUNK) + len(plain[0])
    got, want = ([layer[behind:] for layer in layers] for layers in (found, wanted))
    torch.testing.assert_close(tensors(got), tensors(want), rtol=1e-9, atol=1e-9)


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


def test_a_kept_form_is_not_computed_again() -> None:
    kept = RecentForms()
    ChunkKV(prefiller(), SYSTEM, WARM, kept=kept).compute("warm", CHUNK)
    # a pool without a slot computes nothing
    idle = ChunkKV(prefiller(0), SYSTEM, WARM, kept=kept)
    assert idle.compute("system", CHUNK) == ChunkKV(prefiller(), SYSTEM, WARM).compute("system", CHUNK)


def test_contrasts_do_not_push_plain_forms_out() -> None:
    recent = RecentForms(1)
    recent.put(("plain", "float32", (), (1,)), [])
    recent.put(("contrast", "float32", (), (1,)), [])
    assert recent.get(("plain", "float32", (), (1,))) == []


@pytest.mark.parametrize(
    "other",
    [
        lambda kept: ChunkKV(prefiller(0), WARM, WARM, kept=kept),
        lambda kept: ChunkKV(prefiller(0), SYSTEM, SYSTEM, kept=kept),
        lambda kept: ChunkKV(prefiller(0, "int8"), SYSTEM, WARM, kept=kept),
    ],
    ids=["system prompt", "unrelated text", "stored form"],
)
def test_a_form_behind_something_else_is_computed(other: Callable[[RecentForms], ChunkKV]) -> None:
    kept = RecentForms()
    ChunkKV(prefiller(), SYSTEM, WARM, kept=kept).compute("warm", CHUNK)
    with pytest.raises(KVExhausted):
        other(kept).compute("warm", CHUNK)


def test_the_oldest_recent_form_goes_first() -> None:
    recent, keys = RecentForms(2), [("plain", "float32", (), (number,)) for number in range(3)]
    for key in keys:
        recent.put(key, [])
    assert [recent.get(key) for key in keys] == [None, [], []]


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


LIMITS = {"float32": 1e-6, "bfloat16": 0.03, "int8": 0.06}


@pytest.mark.parametrize("stored", LIMITS)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_blend_of_rounded_chunks_is_that_of_unrounded_ones_within_a_share(stored: str, ratio: float) -> None:
    other, question = random_ids(17, 5), random_ids(6, 4)
    parts = [(SegmentKind.SYSTEM, SYSTEM), (SegmentKind.CHUNK, CHUNK), (SegmentKind.CHUNK, other)]
    layout = PromptLayout.of([*parts, (SegmentKind.QUESTION, question)])
    plan = BlendPlan.of(layout, [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH], ratio)
    found = []
    for by in (prefiller(), prefiller(stored=stored)):
        chunks = ChunkKV(by, SYSTEM, WARM)
        system = chunks.system_payloads()
        assert system is not None
        loaded = {0: system}
        for segment in layout.segments[1:3]:
            loaded[segment.start] = chunks.compute("warm" if segment.start > 5 + 12 else "system", segment.token_ids)
        done = by.run(plan, build_selector(SelectorSpec()) if ratio else PlainSelector(), loaded)
        found.append(done.first)
        assert done.state.parity_error <= 1e-6 + by.precision.rounding_max
    assert 0.0 < float((found[0] - found[1]).abs().max()) <= LIMITS[stored] * float(found[0].abs().max())


def test_what_was_captured_elsewhere_gets_the_same_form() -> None:
    by = prefiller(stored="int8")
    wide = ChunkKV(prefiller(), (), WARM).compute("bare", CHUNK)
    for got, wanted in zip(ChunkKV(by, (), WARM).store(wide, len(CHUNK)), wide, strict=True):
        assert bytes(got) == bytes(by.precision.encode(wanted, len(CHUNK)))
