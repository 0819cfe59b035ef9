#!/usr/bin/env python3
"""Time to first token: full prefill against reuse and blends, chunks in host memory and cold on disk.

Every mode runs once per round, in turn, so that a machine whose speed drifts drifts for all of them. Measured from
submit to the first text, through the whole in-process system. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvloop
from machine import describe_machine, real_text, wait_passively

from kvblend.actors.messages import BlendOptions, ChatMessage, Delta, Document, Generate, Sampling
from kvblend.actors.settings import DEFAULT_SYSTEM, Settings
from kvblend.actors.system import System
from kvblend.cli.models import resolve_model
from kvblend.engine.chat import ChatRole
from kvblend.engine.loaders.load import LoadedModel, load_model
from kvblend.engine.prompt import PromptDocument, build_prompt
from kvblend.engine.tokenizer import Tokenizer

QUESTION = "What is stored for every chunk, and what is computed again?"
MODES: list[tuple[str, float | None, str]] = [
    ("full", None, "none"),
    *[(mode, ratio, tier) for tier in ("host", "disk") for mode, ratio in
      (("reuse", None), ("blend", 0.05), ("blend", 0.15), ("blend", 0.30))],
]  # fmt: skip


def cut_chunks(tokenizer: Tokenizer, count: int, size: int) -> list[str]:
    """`count` texts of about `size` tokens, one after another out of the project's prose."""
    ids = tokenizer.encode(real_text(), special=False)
    if len(ids) < count * size:
        raise SystemExit(f"{count} chunks of {size} tokens need {count * size} tokens of text; there are {len(ids)}")
    # the empty line that ends a document takes a token or two
    return [tokenizer.decode(ids[i * size : (i + 1) * size - 2]).strip() for i in range(count)]


class Reference:
    """transformers' own float32 model with the same weights, prefilling the same ids."""

    def __init__(self, loaded: LoadedModel) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import LlamaConfig, LlamaForCausalLM

        c, w = loaded.model.config, loaded.model.weights
        others = c.attention_bias or c.mlp_bias or c.qk_norm or c.post_norms or c.sliding_window
        if c.rope.kind != "default" or c.rope.rotary_fraction != 1.0 or others:
            raise SystemExit("the reference run knows plain Llama without biases or windows; use --no-transformers")
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim, max_position_embeddings=c.context_length, rms_norm_eps=c.rms_norm_eps,
            tie_word_embeddings=c.tie_embeddings, rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self._model = LlamaForCausalLM(config).requires_grad_(False)
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        inner = self._model.model
        inner.embed_tokens.weight.data = w.embedding
        inner.norm.weight.data = w.norm
        self._model.lm_head.weight.data = w.head
        for layer, ours in zip(inner.layers, w.layers, strict=True):
            layer.input_layernorm.weight.data = ours.attention_norm
            layer.post_attention_layernorm.weight.data = ours.mlp_norm
            parts = ours.qkv.split((q, kv, kv))
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                getattr(layer.self_attn, name).weight.data = part.clone()
            layer.self_attn.o_proj.weight.data = ours.output
            gate, up = ours.gate_up.chunk(2)
            layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data = gate.clone(), up.clone()
            layer.mlp.down_proj.weight.data = ours.down

    @property
    def model(self) -> Any:
        """The LlamaForCausalLM itself."""
        return self._model

    def save(self, folder: Path) -> None:
        """The model as a Hugging Face folder, without a tokenizer."""
        self._model.save_pretrained(folder)

    @torch.inference_mode()
    def prefill_ms(self, ids: list[int]) -> float:
        """Milliseconds from ids to the first token, with the KV cache kept."""
        began = time.perf_counter()
        int(self._model(torch.tensor([ids]), logits_to_keep=1, use_cache=True).logits[0, -1].argmax())
        return 1e3 * (time.perf_counter() - began)


def make_cold(system: System, folder: Path) -> None:
    """Empty the host pool and ask the kernel to forget the chunk files, so that the next read comes from the disk."""
    for path in folder.rglob("*.kvc"):
        system.evict_host_nowait(path.stem)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


async def measure(
    system: System, name: str, texts: list[str], mode: str, ratio: float | None
) -> tuple[float, dict[str, Any]]:
    """Milliseconds from submit to the first text, and the request's usage."""
    request = Generate(
        name,
        (ChatMessage("user", QUESTION),),
        tuple(Document(text) for text in texts),
        sampling=Sampling(max_tokens=1),
        blend=BlendOptions(mode=mode, recompute_ratio=ratio),  # type: ignore[arg-type]
    )
    began = time.perf_counter()
    stream = await system.submit(request)
    first = None
    async for event in stream:
        if isinstance(event, Delta) and first is None:
            first = 1e3 * (time.perf_counter() - began)
    assert stream.terminal is not None
    if first is None:
        raise SystemExit(f"{mode} gave no text: {stream.terminal}")
    usage = stream.terminal.usage  # type: ignore[union-attr]
    await system.settle()
    return first, {"charged_ratio": usage.charged_ratio, "tokens": usage.prompt_tokens, "hits": usage.chunk_hits,
                   "tiers": usage.tiers}  # fmt: skip


async def run_chunks(
    system: System, store: Path, texts: list[str], rounds: int, reference: Callable[[], float] | None, log: Any
) -> tuple[list[dict[str, Any]], list[float]]:
    """All modes over these chunks; the first round warms up and is not counted."""
    await (await system.submit(
        Generate("store", (), tuple(Document(t) for t in texts), generate=False)
    )).result()  # fmt: skip
    times: dict[int, list[float]] = {index: [] for index in range(len(MODES))}
    facts: dict[int, dict[str, Any]] = {}
    baseline: list[float] = []
    for turn in range(rounds + 1):
        # a new order each round: nothing but the chunks themselves can be reused
        order = texts[turn % len(texts) :] + texts[: turn % len(texts)]
        for index, (mode, ratio, tier) in enumerate(MODES):
            if tier == "disk":
                make_cold(system, store)
            elapsed, facts[index] = await measure(system, f"{len(texts)}-{turn}-{index}", order, mode, ratio)
            if mode != "full" and facts[index]["hits"] != len(texts):
                raise SystemExit(f"{facts[index]['hits']} of {len(texts)} chunks hit; the figures would be wrong")
            if turn:
                times[index].append(elapsed)
        if reference is not None:
            elapsed = await asyncio.to_thread(reference)
            if turn:
                baseline.append(elapsed)
        print(f"{len(texts)} chunks, round {turn} of {rounds}", file=log, flush=True)
    rows = [
        {
            "mode": mode,
            "chunks": len(texts),
            "tokens": facts[index]["tokens"],
            "ratio": ratio,
            "tier": tier,
            "ttft_ms_median": statistics.median(times[index]),
            "ttft_ms_min": min(times[index]),
            "charged_ratio": facts[index]["charged_ratio"],
        }
        for index, (mode, ratio, tier) in enumerate(MODES)
    ]
    return rows, baseline


def speedups(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Own full over each mode with chunks in host memory, by number of chunks."""
    out: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["tier"] != "host":
            continue
        full = next(r for r in rows if r["mode"] == "full" and r["chunks"] == row["chunks"])
        name = row["mode"] if row["ratio"] is None else f"{row['mode']}@{row['ratio']:g}"
        out.setdefault(str(row["chunks"]), {})[name] = full["ttft_ms_median"] / row["ttft_ms_median"]
    return out


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    name, path = resolve_model(args.model)
    rows, ratio = [], None
    loaded = load_model(path, torch.float32, torch.device("cpu"))
    reference = None if args.no_transformers else Reference(loaded)
    with tempfile.TemporaryDirectory() as folder:
        system = await System.start(Settings(store=Path(folder) / "store", dtype=args.dtype, gate="off"), path, name)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(system.close)
            for count in args.chunks:
                texts = cut_chunks(loaded.tokenizer, count, args.chunk_tokens)
                again = None
                if reference is not None and count == min(args.chunks):
                    documents = [PromptDocument(text=text) for text in texts]
                    turns: list[tuple[ChatRole, str]] = [("user", QUESTION)]
                    layout = build_prompt(loaded.tokenizer, loaded.template, DEFAULT_SYSTEM, turns, documents)
                    again = functools.partial(reference.prefill_ms, list(layout.token_ids))
                part, baseline = await run_chunks(system, Path(folder) / "store", texts, args.rounds, again, sys.stderr)
                rows += part
                if baseline:
                    full = next(r for r in part if r["mode"] == "full")
                    ratio = full["ttft_ms_median"] / statistics.median(baseline)
    return {
        "machine": describe_machine(),
        "model": name,
        "rounds": args.rounds,
        "rows": rows,
        "speedup": speedups(rows),
        "full/transformers": ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[6, 12], help="numbers of chunks (6 12)")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one warm-up")
    parser.add_argument("--no-transformers", action="store_true", help="leave the reference prefill out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    wait_passively()
    result = uvloop.run(run(args))
    if args.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:g}"
        print(f"{row['mode']:6} {ratio:5} {row['tier']:5} {row['chunks']:3} chunks {row['tokens']:6} tokens "
              f"{row['ttft_ms_median']:9.0f} ms (min {row['ttft_ms_min']:.0f})")  # fmt: skip
    print(f"speed-up over own full prefill: {result['speedup']}")
    print(f"full / transformers: {result['full/transformers']}")


if __name__ == "__main__":
    main()
