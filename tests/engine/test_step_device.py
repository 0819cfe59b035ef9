"""The engine on a device that is not the CPU: nothing mixes tensors of both, and the host seldom waits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from second_device import DEVICE, HOST, MixedDevices, SecondDevice
from tiny_models import Bench, DictSource, random_ids, tiny_config, tiny_model

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.attention.xformers import XformersBackend
from kvblend.engine.capture import Capture
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.model import Model
from kvblend.engine.payloads import DeviceBlock, Payload
from kvblend.engine.sampling import SamplingPlan, sample
from kvblend.engine.selectors.base import Pass, Passes, SelectionContext, Selector, merge_rows, top_rows
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.sequence import SequenceState
from kvblend.engine.step import Step, WorkItem
from kvblend.engine.weights import LayerWeights, ModelWeights

SYSTEM, A, B, QUESTION = (random_ids(n, n) for n in (5, 14, 18, 6))
PARTS = [
    (SegmentKind.SYSTEM, SYSTEM),
    (SegmentKind.CHUNK, A),
    (SegmentKind.CHUNK, B),
    (SegmentKind.QUESTION, QUESTION),
]
REUSE = (Reuse.EXACT, Reuse.FRESH, Reuse.CACHED, Reuse.FRESH)
LAYOUT = PromptLayout.of(PARTS)
MISS, HIT = LAYOUT.segments[1], LAYOUT.segments[2]


class QuestionGuided:
    name = "question-guided"

    def passes(self, context: SelectionContext) -> Passes:
        everything = merge_rows(context.cached_rows[:0], context.fresh_rows)
        seen = yield Pass(range(context.num_layers), everything, observe="attention")
        assert seen.attention is not None
        chosen = top_rows(context.cached_rows, seen.attention[context.cached_rows], context.budget)
        yield Pass(range(context.num_layers), merge_rows(chosen, context.fresh_rows))


@pytest.fixture(scope="module")
def payloads() -> dict[int, list[memoryview]]:
    bench = Bench(tiny_model(tiny_config(num_layers=3)))
    return {0: bench.payloads((), SYSTEM), HIT.start: bench.payloads(SYSTEM, B)}


def move_to_device(model: Model) -> Model:
    def moved(layer: LayerWeights) -> LayerWeights:
        fields: dict[str, Any] = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        fields.update((name, tensor.to(DEVICE)) for name, tensor in fields.items() if tensor is not None)
        return LayerWeights(**fields)

    weights = model.weights
    embedding = weights.embedding.to(DEVICE)
    layers = tuple(moved(layer) for layer in weights.layers)
    return Model(model.config, ModelWeights(embedding, layers, weights.norm.to(DEVICE), embedding))


def blend(
    model: Model,
    payloads: Mapping[int, Sequence[Payload]],
    selector: Selector,
    backend: AttentionBackend,
    rows_max: int = 1 << 20,
    capturing: bool = True,
) -> tuple[torch.Tensor, SequenceState, list[int]]:
    """The last row's logits of a blend with a miss and a hit, the sequence, and two sampled tokens."""
    config, device = model.config, model.device
    pool = SlabPool(config, 1 << 12, model.dtype, device)
    spans = [(MISS.start, MISS.end)] if capturing else []
    capture = Capture(spans, config.num_layers, config.num_kv_heads, config.head_dim, model.dtype)
    sequence = SequenceState.start(
        "r",
        BlendPlan.of(LAYOUT, REUSE, 0.4),
        selector,
        pool.reserve(LAYOUT.num_tokens + 2),
        config.num_layers,
        DictSource(payloads),
        capture,
    )
    step = Step(model, backend)
    tokens: list[int] = []
    logits = torch.empty(0)
    while len(tokens) < 2:
        outcome = step.run([WorkItem(sequence, rows_max)])[0]
        if outcome.hidden is not None:
            logits = model.logits(outcome.hidden[None])
            plan = SamplingPlan(0.7, 0.9, 5)
            tokens += sample(logits, [plan], [sequence.num_computed_tokens])
            sequence.append_token(tokens[-1])
    return logits[0].to(HOST), sequence, tokens


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_bias: torch.Tensor, scale: float
) -> torch.Tensor:
    weights = (torch.einsum("bmhk,bnhk->bhmn", q, k) * scale + attn_bias).softmax(-1)
    return torch.einsum("bhmn,bnhk->bmhk", weights, v)


BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": SdpaBackend(tile_rows=8),
    "xformers": XformersBackend(dense_attention, group_rows=8),
}
SELECTORS: dict[str, Selector] = {"divergence": DivergenceSelector(), "question-guided": QuestionGuided()}


@pytest.mark.parametrize("rows_max", [7, 1 << 20])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_blend_on_a_device_equals_the_one_on_the_cpu(
    payloads: dict[int, list[memoryview]], selector: str, backend: str, rows_max: int
) -> None:
    model = tiny_model(tiny_config(num_layers=3))
    want, on_host, want_tokens = blend(model, payloads, SELECTORS[selector], BACKENDS[backend], rows_max)
    with SecondDevice():
        got, on_device, tokens = blend(
            move_to_device(model), payloads, SELECTORS[selector], BACKENDS[backend], rows_max
        )
    assert torch.allclose(got, want, rtol=0, atol=1e-9)
    assert tokens == want_tokens
    assert on_device.capture is not None
    assert on_host.capture is not None
    assert on_device.capture.payloads(0) == on_host.capture.payloads(0)
    assert on_device.parity_error == pytest.approx(on_host.parity_error, abs=1e-12)


def waits_of(model: Model, payloads: dict[int, list[memoryview]]) -> list[str]:
    device = SecondDevice()
    with device:
        moved = move_to_device(model)
        device.waits.clear()
        blend(moved, payloads, DivergenceSelector(), SdpaBackend(), capturing=False)
        return device.waits


def test_the_host_waits_as_often_for_many_layers_as_for_few(payloads: dict[int, list[memoryview]]) -> None:
    few = waits_of(tiny_model(tiny_config(num_layers=3)), payloads)
    deep = {start: [*layers, *layers] for start, layers in payloads.items()}
    many = waits_of(tiny_model(tiny_config(num_layers=6)), deep)
    assert few == many


def test_a_blend_of_layers_on_the_device_equals_the_one_from_host_memory(
    payloads: dict[int, list[memoryview]],
) -> None:
    model = tiny_model(tiny_config(num_layers=3))
    want, _, want_tokens = blend(model, payloads, DivergenceSelector(), SdpaBackend())
    with SecondDevice():
        blocks = {start: DeviceBlock(3, len(layers[0]), DEVICE) for start, layers in payloads.items()}
        resident = {s: [blocks[s].fill(k, layer) for k, layer in enumerate(layers)] for s, layers in payloads.items()}
        assert all(layer.device == DEVICE for layers in resident.values() for layer in layers)  # type: ignore[union-attr]
        got, sequence, tokens = blend(move_to_device(model), resident, DivergenceSelector(), SdpaBackend())
    assert torch.allclose(got, want, rtol=0, atol=1e-9)
    assert tokens == want_tokens
    assert sequence.parity_error == pytest.approx(0.0, abs=1e-12)


def test_stored_nan_does_not_pass_for_agreement(payloads: dict[int, list[memoryview]]) -> None:
    model = tiny_model(tiny_config(num_layers=3))
    spoilt = [memoryview(bytearray(layer)) for layer in payloads[HIT.start]]
    torch.frombuffer(spoilt[0], dtype=model.dtype)[3] = torch.nan
    _, sequence, _ = blend(model, {**payloads, HIT.start: spoilt}, DivergenceSelector(), SdpaBackend())
    assert sequence.parity_error == math.inf


def test_the_pretended_device_refuses_mixed_tensors() -> None:
    with SecondDevice(), pytest.raises(MixedDevices, match="index_select"):
        torch.zeros(3, device=DEVICE).index_select(0, torch.tensor([1]))


def test_the_pretended_device_counts_waits() -> None:
    with SecondDevice() as device:
        float(torch.zeros(3, device=DEVICE).sum())
    assert device.waits == ["__float__"]
