#!/usr/bin/env python3
"""Checks the engine on the device that is there: attention against float64, and ratio 1.0 against a full prefill.

Chunks that lie on the device, as in the device pool, are compared with the same from host memory, and both are timed.
Needs torch and this repository only: `python scripts/gpu_check.py --quick`, from anywhere, installed or not. Random
weights, no downloads. Ends with 0 where every check passes, 1 where one fails, 2 where the device is not there.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_table import Check, print_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from kvblend.engine.attention.base import AttentionBackend, reference_attention
from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.attention.xformers import probe_xformers
from kvblend.engine.capture import Capture
from kvblend.engine.config import ModelConfig
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.model import Model
from kvblend.engine.payloads import DeviceBlock, Payload
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.sequence import SequenceState
from kvblend.engine.step import Step, WorkItem
from kvblend.engine.weights import build_weights, expected_shapes

# largest error allowed, relative to the largest value of the reference (at least 1)
ATTENTION_TOLERANCE = {torch.float32: 3e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
MODEL_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
NO_NUMBER = 1e30
WINDOW = 20
Payloads = Mapping[int, Sequence[Payload]]


class Size(NamedTuple):
    """How large the model and its prompt are."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    system: int
    chunk: int
    question: int


SIZES = {"cpu": Size(5, 128, 8, 2, 512, 24, 96, 16), "cuda": Size(16, 1024, 16, 4, 4096, 64, 512, 48)}


def find_backends(device: torch.device, dtype: torch.dtype) -> list[AttentionBackend]:
    """Every backend that runs here."""
    found, _ = probe_xformers(device, dtype)
    return [SdpaBackend(), *([found] if found is not None else [])]


def random_positions(generator: torch.Generator, longest: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every kind of rows a pass can have, by name."""
    half = longest // 2
    yield "rows from 0", torch.arange(half)
    yield "rows behind a prefix", torch.arange(half, longest)
    yield "scattered rows", torch.randperm(longest, generator=generator)[: longest // 6].sort().values
    starts = range(7, longest - 40, longest // 5)
    yield "runs of rows", torch.cat([torch.arange(s, s + 33) for s in starts])
    yield "one row", torch.tensor([longest - 1])


def check_attention(device: torch.device, rounds: int) -> Iterator[Check]:
    """Random cases of every kind, for every backend and dtype that runs here."""
    dtypes = [torch.float32] if device.type == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
    longest = 330 if device.type == "cpu" else 2100
    for dtype in dtypes:
        for backend in find_backends(device, dtype):
            errors: dict[str, float] = {}
            generator = torch.Generator().manual_seed(0)
            for heads, kv_heads, dim in [(8, 2, 64), (9, 3, 64), (4, 4, 128)] * rounds:
                for name, positions in random_positions(generator, longest):
                    q = torch.randn((len(positions), heads, dim), generator=generator).to(device, dtype)
                    slots = torch.randn((2, kv_heads, longest + 9, dim), generator=generator).to(device, dtype)
                    for title, window in ((name, None), (f"{name}, window", WINDOW)):
                        error = attention_error(backend, positions, q, slots, window)
                        errors[title] = max(errors.get(title, 0.0), error)
            limit = ATTENTION_TOLERANCE[dtype]
            for name, error in errors.items():
                yield Check(name, backend.name, str(dtype)[6:], error, limit, error <= limit)


def attention_error(
    backend: AttentionBackend, positions: torch.Tensor, q: torch.Tensor, slots: torch.Tensor, window: int | None = None
) -> float:
    """Largest error of rows q `[rows, heads, dim]` over k and v in `slots [2, kv_heads, capacity, dim]`."""
    keys, scale = int(positions[-1]) + 1, q.shape[2] ** -0.5
    k, v = slots[0, :, :keys], slots[1, :, :keys]
    out = backend.attend(backend.prepare(positions, q.device, q.dtype, window), q, k, v, scale)
    return relative_error(out, reference_attention(positions, q, k, v, scale, window))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value of `want` (at least 1); NO_NUMBER where that is none."""
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1.0))
    return error if math.isfinite(error) else NO_NUMBER


def build_model(size: Size, device: torch.device) -> Model:
    """A Llama of random float32 weights, made on the device."""
    inner, head_dim = size.hidden * 11 // 4, size.hidden // size.heads
    shape = (size.layers, size.hidden, inner, size.heads, size.kv_heads, head_dim, size.vocab)
    config = ModelConfig(*shape, context_length=8192, tie_embeddings=True)
    shapes = expected_shapes(config)
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str) -> torch.Tensor:
        wanted = shapes[name]
        if len(wanted) == 1:
            return torch.ones(wanted, device=device)
        return torch.randn(wanted, generator=generator, device=device) * (1.2 / math.sqrt(wanted[-1]))

    return Model(config, build_weights(config, read, torch.float32, device))


class Source:
    """A LayerSource of payloads in memory: segment start -> one payload per layer."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads

    def take(self, layer: int) -> list[tuple[int, Payload]]:
        return [(start, layers[layer]) for start, layers in self._payloads.items()]


class Prompt:
    """System, chunks in an order they were not stored in (one twice, one missing), question; and its prefills."""

    def __init__(self, model: Model, backend: AttentionBackend, size: Size) -> None:
        self.model, self.step = model, Step(model, backend)
        self.pool = SlabPool(model.config, 1 << 16, model.dtype, model.device)
        generator = torch.Generator().manual_seed(1)

        def ids(count: int) -> list[int]:
            drawn: list[int] = torch.randint(0, size.vocab, (count,), generator=generator).tolist()
            return drawn

        system, a, b, c, d = ids(size.system), *(ids(size.chunk - 5 * i) for i in range(4))
        chunks = [(SegmentKind.CHUNK, part) for part in (c, a, d, b, a)]
        question = (SegmentKind.QUESTION, ids(size.question))
        self.layout = PromptLayout.of([(SegmentKind.SYSTEM, system), *chunks, question])
        self.reuse = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH, Reuse.CACHED, Reuse.CACHED, Reuse.FRESH]
        self.payloads: dict[int, Sequence[Payload]] = {0: self._store([], system)}
        for segment, mark in list(zip(self.layout.segments, self.reuse, strict=True))[1:]:
            if mark is not Reuse.FRESH:
                self.payloads[segment.start] = self._store(system, segment.token_ids)

    def place_on_device(self) -> None:
        """Have the chunks' KV on the device from now on, as the device pool has it."""
        for start, layers in self.payloads.items():
            block = DeviceBlock(len(layers), len(layers[0]), self.model.device)
            placed = [block.fill(index, layer) for index, layer in enumerate(layers)]
            if block.failed:
                raise RuntimeError("the device has no memory for the chunks")
            self.payloads[start] = placed

    def _store(self, behind: Sequence[int], ids: Sequence[int]) -> list[memoryview]:
        parts = [(SegmentKind.SYSTEM, behind)] if behind else []
        layout = PromptLayout.of([*parts, (SegmentKind.CHUNK, ids)])
        c = self.model.config
        span = (len(behind), layout.num_tokens)
        capture = Capture([span], c.num_layers, c.num_kv_heads, c.head_dim, self.model.dtype)
        plan = BlendPlan.of(layout, [Reuse.FRESH] * len(layout.segments), 0.0)
        _, sequence = self._run(plan, PlainSelector(), {}, capture)
        self.pool.release(sequence.slab)
        return capture.payloads(0)

    def _run(
        self, plan: BlendPlan, selector: Selector, payloads: Payloads, capture: Capture | None = None
    ) -> tuple[torch.Tensor, SequenceState]:
        slab = self.pool.reserve(plan.layout.num_tokens + 1)
        source = Source(payloads)
        sequence = SequenceState.start("check", plan, selector, slab, self.model.num_layers, source, capture)
        while True:
            hidden = self.step.run([WorkItem(sequence, 1024)])[0].hidden
            if hidden is not None:
                return self.model.logits(hidden[None])[0], sequence

    def prefill(self, ratio: float | None) -> tuple[torch.Tensor, SequenceState]:
        """A blend, or where `ratio` is None a full prefill: logits of the last row, and the sequence."""
        if ratio is None:
            return self._run(BlendPlan.of(self.layout, [Reuse.FRESH] * 7, 0.0), PlainSelector(), {})
        return self._run(BlendPlan.of(self.layout, self.reuse, ratio), DivergenceSelector(), self.payloads)

    def decode(self, sequences: Sequence[SequenceState], token_id: int) -> torch.Tensor:
        """Logits `[sequences, vocab]` after one more token, all sequences packed into one tick."""
        for sequence in sequences:
            sequence.append_token(token_id)
        outcomes = self.step.run([WorkItem(sequence, 1) for sequence in sequences])
        return self.model.logits(torch.stack([o.hidden for o in outcomes if o.hidden is not None]))


@torch.inference_mode()
def check_model(device: torch.device, size: Size, timings: dict[str, float]) -> Iterator[Check]:
    """Ratio 1.0 against a full prefill on a random model, for every backend; fills `timings` in milliseconds."""
    model = build_model(size, device)
    limit = MODEL_TOLERANCE[device.type]
    for backend in find_backends(device, model.dtype):
        prompt = Prompt(model, backend, size)
        tokens = prompt.layout.num_tokens
        want, full = prompt.prefill(None)
        got, blended = prompt.prefill(1.0)
        reused, _ = prompt.prefill(0.0)
        decoded = prompt.decode([full, blended], int(want.argmax()))
        errors = {
            "ratio 1.0: logits": relative_error(got, want),
            "ratio 1.0: keys": relative_error(blended.slab.k[:, :, :tokens], full.slab.k[:, :, :tokens]),
            "ratio 1.0: values": relative_error(blended.slab.v[:, :, :tokens], full.slab.v[:, :, :tokens]),
            "next token, packed": relative_error(decoded[1], decoded[0]),
            "stored layer-0 keys": min(blended.parity_error, NO_NUMBER),
        }
        for name, error in errors.items():
            yield Check(name, backend.name, "float32", error, limit, error <= limit)
        # without this one the others could pass by comparing a prefill with itself
        apart = relative_error(reused, want)
        yield Check("ratio 0.0 differs", backend.name, "float32", apart, 10 * limit, 10 * limit < apart < NO_NUMBER)
        timings[f"{backend.name} full"] = median_ms(prompt, None)
        timings[f"{backend.name} blend@0.15"] = median_ms(prompt, 0.15)
        prompt.place_on_device()
        error = relative_error(prompt.prefill(0.0)[0], reused)
        yield Check("device pool", backend.name, "float32", error, limit, error <= limit)
        timings[f"{backend.name} blend@0.15, device pool"] = median_ms(prompt, 0.15)


def median_ms(prompt: Prompt, ratio: float | None) -> float:
    """Median of three prefills in milliseconds: full ones where `ratio` is None."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        logits, sequence = prompt.prefill(ratio)
        float(logits[0])  # waits for the device
        taken.append(1e3 * (time.perf_counter() - start))
        prompt.pool.release(sequence.slab)
    return sorted(taken)[1]


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type != "cuda":
        return f"cpu {platform.machine()}, {torch.get_num_threads()} threads"
    capability = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, capability {capability}, CUDA {torch.version.cuda}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of random attention cases instead of ten")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA device here; available: cpu", file=sys.stderr)
        return 2
    device = torch.device(name)
    xformers = probe_xformers(device, torch.float32)[1]
    facts = {"device": describe(device), "torch": torch.__version__, "xformers": xformers}
    timings: dict[str, float] = {}
    checks = [*check_attention(device, 1 if options.quick else 10), *check_model(device, SIZES[name], timings)]
    passed = all(check.ok for check in checks)
    if options.json:
        found = {"checks": [asdict(check) for check in checks], "timings_ms": timings, "ok": passed}
        print(json.dumps({**facts, **found}))
    else:
        print_table(checks, facts, timings)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
