"""Tiny seeded models and blended runs on them, for tests of the engine without any file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.capture import Capture
from kvblend.engine.config import ModelConfig, RopeConfig
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.model import Model
from kvblend.engine.payloads import LayerSource, Payload
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.sequence import SequenceState
from kvblend.engine.step import Step, WorkItem
from kvblend.engine.weights import build_weights, expected_shapes

CPU = torch.device("cpu")


def tiny_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "num_layers": 4,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "context_length": 512,
        "rope": RopeConfig(theta=10000.0),
        "tie_embeddings": True,
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def tiny_model(config: ModelConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    """Random weights, large enough that attention is far from uniform; float64 makes comparisons sharp."""
    config = config or tiny_config()
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config)

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1 and name.endswith("weight"):
            return 1.0 + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        fan = shape[-1] if len(shape) > 1 else 4.0
        return torch.randn(shape, generator=generator, dtype=torch.float64) * (1.6 / math.sqrt(fan))

    return Model(config, build_weights(config, read, dtype, CPU))


def random_ids(count: int, seed: int, vocab: int = 97) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())


class DictSource:
    """A LayerSource over payloads held in a dict: segment start -> payload per layer; `ready` layers are served."""

    def __init__(self, payloads: Mapping[int, Sequence[Payload]], ready: int = 1 << 30) -> None:
        self.payloads = payloads
        self.ready = ready

    def take(self, layer: int) -> Sequence[tuple[int, Payload]] | None:
        if layer >= self.ready:
            return None
        return [(start, layers[layer]) for start, layers in self.payloads.items()]


@dataclass
class Run:
    """A finished prefill: logits of the last row, the sequence and its KV `[layers, kv_heads, tokens, dim]`."""

    logits: torch.Tensor
    sequence: SequenceState
    k: torch.Tensor
    v: torch.Tensor


class Bench:
    """Runs prompts through `Step` the way the blender does, one sequence at a time."""

    def __init__(self, model: Model, backend: AttentionBackend | None = None) -> None:
        self.model = model
        self.step = Step(model, backend or SdpaBackend())
        self.pool = SlabPool(model.config, 1 << 16, model.dtype, CPU)

    def start(
        self,
        layout: PromptLayout,
        reuse: Sequence[Reuse],
        ratio: float,
        selector: Selector,
        source: LayerSource | None = None,
        capture: Sequence[tuple[int, int]] = (),
        extra: int = 8,
    ) -> SequenceState:
        config = self.model.config
        plan = BlendPlan.of(layout, reuse, ratio)
        recorder = (
            Capture(capture, config.num_layers, config.num_kv_heads, config.head_dim, self.model.dtype)
            if capture
            else None
        )
        slab = self.pool.reserve(layout.num_tokens + extra)
        return SequenceState.start("r", plan, selector, slab, config.num_layers, source, recorder)

    def finish(self, sequence: SequenceState, rows_max: int = 1 << 30, ticks_max: int = 1000) -> Run:
        for _ in range(ticks_max):
            outcome = self.step.run([WorkItem(sequence, rows_max)])[0]
            if outcome.status == "last_row":
                assert outcome.hidden is not None
                with torch.inference_mode():
                    logits = self.model.logits(outcome.hidden[None])[0]
                n = sequence.num_computed_tokens
                return Run(logits, sequence, sequence.slab.k[:, :, :n].clone(), sequence.slab.v[:, :, :n].clone())
            assert outcome.status == "running", outcome.status
        raise AssertionError("the prefill does not end")

    def full(self, layout: PromptLayout, rows_max: int = 1 << 30) -> Run:
        reuse = [Reuse.FRESH] * len(layout.segments)
        return self.finish(self.start(layout, reuse, 0.0, PlainSelector()), rows_max)

    def row_layers(
        self, layout: PromptLayout, reuse: Sequence[Reuse], source: LayerSource, selector: Selector, rows_max: int
    ) -> int:
        """Rows that are projected, layer by layer, in a blend at ratio 0.3 that waits for nothing."""
        sequence, count = self.start(layout, reuse, 0.3, selector, source), 0
        while True:
            outcome = self.step.run([WorkItem(sequence, rows_max)])[0]
            count += outcome.row_layers
            if outcome.status == "last_row":
                return count

    def payloads(self, behind: Sequence[int], ids: Sequence[int]) -> list[memoryview]:
        """The stored form of a chunk computed behind `behind` (may be empty)."""
        parts = [(SegmentKind.SYSTEM, behind)] if behind else []
        layout = PromptLayout.of([*parts, (SegmentKind.CHUNK, ids)])
        start = len(behind)
        reuse = [Reuse.FRESH] * len(layout.segments)
        sequence = self.start(layout, reuse, 0.0, PlainSelector(), capture=[(start, start + len(ids))])
        self.finish(sequence)
        assert sequence.capture is not None
        return sequence.capture.payloads(0)
