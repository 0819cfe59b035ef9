#!/usr/bin/env python3
"""Tokens per second of decoding, one sequence and several at once, beside transformers at the same context.

Everything runs in one process and in turn, a few tokens each, so that a machine whose speed drifts drifts for all of
them. Greedy, float32; transformers with its own KV cache and sdpa. Our context is computed once and read by every
sequence from its stored form. `tokens_per_cpu_s` counts the processor's seconds instead of the clock's: a busy machine
changes it less. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from machine import describe_machine, real_text, wait_passively
from ttft import Reference

from kvblend.cli.models import resolve_model
from kvblend.engine.attention.choose import choose_backend
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.loaders.load import LoadedModel, load_model
from kvblend.engine.output import OutputText
from kvblend.engine.runner import Runner, SequenceSpec
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.plain import PlainSelector

CPU = torch.device("cpu")
# a token each, so that nothing is measured but the step that makes it
Step = Callable[[], list[int]]


class Silence:
    """A detokeniser of which nothing is wanted."""

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class Stored:
    """A LayerSource of one segment that starts at position 0."""

    def __init__(self, layers: Sequence[memoryview]) -> None:
        self._layers = layers

    def take(self, layer: int) -> Sequence[tuple[int, memoryview]]:
        """The layer, at once."""
        return [(0, self._layers[layer])]


@dataclass
class Subject:
    """One engine at one batch and context, with what its rounds took."""

    engine: str
    batch: int
    context: int
    step: Step
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def run(self, steps: int, *, counted: bool) -> None:
        """Some steps in a row; the first sequence's tokens are noted."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.tokens.append(self.step()[0])
        if counted:
            self.wall_s.append((time.perf_counter() - wall) / steps)
            self.cpu_s.append((time.process_time() - cpu) / steps)

    def row(self) -> dict[str, Any]:
        """What is printed of it."""
        return {
            "engine": self.engine,
            "batch": self.batch,
            "context": self.context,
            "tokens_per_s": self.batch / statistics.median(self.wall_s),
            "tokens_per_cpu_s": self.batch / statistics.median(self.cpu_s),
        }


def own_layers(loaded: LoadedModel, ids: list[int]) -> list[memoryview]:
    """The stored KV of `ids`, computed by a prefill."""
    runner = new_runner(loaded, len(ids) + 1)
    layout = PromptLayout.of([(SegmentKind.CHUNK, tuple(ids)), (SegmentKind.QUESTION, (ids[0],))])
    plan = BlendPlan.of(layout, (Reuse.FRESH, Reuse.FRESH), 0.0)
    runner.start(SequenceSpec("context", plan, PlainSelector(), layout.num_tokens, captures=(0,)))
    while runner.tick([("context", 1 << 30, None)])[0].status != "prefilled":
        pass
    return [memoryview(bytes(layer)) for layer in runner.payloads("context", 0)]


def new_runner(loaded: LoadedModel, tokens_max: int) -> Runner:
    """An engine with room for this many tokens."""
    model = loaded.model
    backend, _ = choose_backend("auto", CPU, model.dtype)
    return Runner(model, backend, SlabPool(model.config, tokens_max + 16, model.dtype, CPU))


def own_step(loaded: LoadedModel, ids: list[int], layers: list[memoryview], batch: int, steps_max: int) -> Step:
    """`batch` sequences over the same context, decoded together."""
    room = len(ids) + steps_max + 16
    runner = new_runner(loaded, batch * (room + 16))
    layout = PromptLayout.of([(SegmentKind.CHUNK, tuple(ids[:-1])), (SegmentKind.QUESTION, (ids[-1],))])
    plan = BlendPlan.of(layout, (Reuse.EXACT, Reuse.FRESH), 0.0)
    names = [str(index) for index in range(batch)]
    for name in names:
        output = OutputText(Silence(), (), (), steps_max + 8)
        greedy = SamplingPlan(0.0, 1.0, 0)
        runner.start(SequenceSpec(name, plan, PlainSelector(), room, Stored(layers), (), greedy, output))
    due = [(name, 1, None) for name in names]
    return lambda: [result.token_id for result in runner.tick(due)]


def reference_step(reference: Reference, ids: list[int], batch: int) -> Step:
    """transformers with as many copies of the context in its cache."""
    model = reference.model
    with torch.inference_mode():
        cache = model(torch.tensor([ids[:-1]]), use_cache=True, logits_to_keep=1).past_key_values
        if batch > 1:
            cache.batch_repeat_interleave(batch)
    tokens = torch.tensor([[ids[-1]]] * batch)

    @torch.inference_mode()
    def step() -> list[int]:
        nonlocal tokens
        tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        return [int(token) for token in tokens[:, 0]]

    return step


def measure(args: argparse.Namespace, loaded: LoadedModel, context: int, reference: Reference | None) -> list[Subject]:
    """All engines and batches at one context, a round of each in turn; the first round warms up."""
    ids = loaded.tokenizer.encode(real_text(), special=False)[:context]
    if len(ids) < context:
        raise SystemExit(f"--context {context} needs as many tokens of text; there are {len(ids)}")
    steps_max = args.steps * (args.rounds + 1)
    layers = own_layers(loaded, ids[:-1])
    subjects = []
    for batch in args.batch:
        subjects.append(Subject("kvblend", batch, context, own_step(loaded, ids, layers, batch, steps_max)))
        if reference is not None:
            subjects.append(Subject("transformers", batch, context, reference_step(reference, ids, batch)))
    for turn in range(args.rounds + 1):
        for subject in subjects:
            subject.run(args.steps, counted=turn > 0)
        print(f"{context} tokens, round {turn} of {args.rounds}", file=sys.stderr, flush=True)
    return subjects


def ratios(rows: list[dict[str, Any]], unit: str) -> dict[str, float]:
    """Every row of ours over transformers at batch 1, by batch and context: above 1 is faster."""
    base = {row["context"]: row[unit] for row in rows if row["engine"] == "transformers" and row["batch"] == 1}
    return {
        f"{row['batch']}@{row['context']}": row[unit] / base[row["context"]]
        for row in rows
        if row["engine"] == "kvblend" and row["context"] in base
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    name, path = resolve_model(args.model)
    loaded = load_model(path, torch.float32, CPU)
    reference = None if args.no_transformers else Reference(loaded)
    rows, agree = [], {}
    for context in args.context:
        subjects = measure(args, loaded, context, reference)
        rows += [subject.row() for subject in subjects]
        first = subjects[0].tokens
        same = [sum(a == b for a, b in zip(first, other.tokens, strict=True)) / len(first) for other in subjects]
        agree[str(context)] = min(same)
    return {
        "machine": describe_machine(),
        "model": name,
        "steps": args.steps,
        "rounds": args.rounds,
        "rows": rows,
        "ratio": ratios(rows, "tokens_per_s"),
        "ratio_cpu": ratios(rows, "tokens_per_cpu_s"),
        "tokens_agree": agree,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a known name, a GGUF file or a folder (smollm2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="sequences decoded together (1 16)")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 3072], help="tokens of context (512 3072)")
    parser.add_argument("--steps", type=int, default=8, help="tokens of each sequence per round")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one warm-up")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    for name in ("batch", "context", "steps", "rounds"):
        given = getattr(args, name)
        least = 2 if name == "context" else 1
        if min(given if isinstance(given, list) else [given]) < least:
            parser.error(f"--{name} is {given}; it must be at least {least}")
    wait_passively()
    result = run(args)
    if args.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        name = f"{row['engine']:12} batch {row['batch']:3} context {row['context']:5}"
        print(f"{name} {row['tokens_per_s']:8.1f} tokens/s "
              f"{row['tokens_per_cpu_s']:8.1f} per second of processor")  # fmt: skip
    print(f"over transformers at batch 1: {result['ratio']}; by processor time: {result['ratio_cpu']}")
    print(f"tokens that all agree on: {result['tokens_agree']}")


if __name__ == "__main__":
    main()
