#!/usr/bin/env python3
"""One peer engine in a process of its own, asked over stdin: prompts of token ids in, seconds out.

Runs under the peer's own Python and needs nothing of this project. Each line of stdin is
`{"prompts": [[ids]], "tokens": n}`: all prompts are run to n tokens each (greedy, end tokens ignored), together where
the engine batches, and `{"seconds": ...}` comes back. The first line it prints says that it is ready, with its version
and settings.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

Run = Callable[[list[list[int]], int], None]
Started = tuple[Run, dict[str, Any]]


def start_openvino(args: argparse.Namespace) -> Started:
    numpy, genai = importlib.import_module("numpy"), importlib.import_module("openvino_genai")
    tensor = importlib.import_module("openvino").Tensor
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": args.threads}
    pipe = genai.LLMPipeline(args.gguf, "CPU", **options)

    def run(prompts: list[list[int]], tokens: int) -> None:
        for ids in prompts:
            x = numpy.asarray([ids], dtype="int64")
            inputs = genai.TokenizedInputs(tensor(x), tensor(numpy.ones_like(x)))
            pipe.generate(inputs, max_new_tokens=tokens, ignore_eos=True)

    return run, {"weights": "as in the GGUF file", **options}


def start_transformers(args: argparse.Namespace) -> Started:
    torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model = library.AutoModelForCausalLM.from_pretrained(args.hf, **options)

    def run(prompts: list[list[int]], tokens: int) -> None:
        for ids in prompts:
            row, cache = torch.tensor([ids]), None
            for _ in range(tokens):
                out = model(row, logits_to_keep=1, use_cache=True, past_key_values=cache)
                row, cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    return run, {"dtype": "float32", "attention": "sdpa", "threads": args.threads}


def start_vllm(args: argparse.Namespace) -> Started:
    cores = f"0-{args.threads - 1}"
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=cores, HF_HUB_OFFLINE="1")
    library = importlib.import_module("vllm")
    options = {"dtype": "bfloat16", "max_model_len": 8192, "max_num_batched_tokens": 8192,
               "enable_prefix_caching": True, "skip_tokenizer_init": True}  # fmt: skip
    llm = library.LLM(model=args.hf, **options)

    def run(prompts: list[list[int]], tokens: int) -> None:
        sampling = library.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    return run, {**options, "cores": cores, "kv_cache_gib": 2}


def start_llamacpp(args: argparse.Namespace) -> Started:
    library = importlib.import_module("llama_cpp")
    options = {"n_ctx": 8192, "n_batch": 2048, "n_ubatch": 512, "n_threads": args.threads,
               "n_threads_batch": args.threads, "flash_attn": True}  # fmt: skip
    llm = library.Llama(args.gguf, verbose=False, **options)

    def run(prompts: list[list[int]], tokens: int) -> None:
        for ids in prompts:
            llm.reset()
            llm.eval(ids)
            for _ in range(tokens - 1):
                llm.eval([llm.sample(temp=0.0)])

    return run, {"weights": "as in the GGUF file", **options}


ENGINES: dict[str, tuple[str, Callable[[argparse.Namespace], Started]]] = {
    "openvino": ("openvino-genai", start_openvino),
    "transformers": ("transformers", start_transformers),
    "vllm": ("vllm-cpu", start_vllm),
    "llamacpp": ("llama-cpp-python", start_llamacpp),
}


def answer(lines: Iterable[str], out: TextIO, handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """One JSON line in `out` for each of `lines`; what goes wrong is said there too, and the next line still counts."""
    for line in lines:
        try:
            reply = handle(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)


def private_stdout() -> TextIO:
    """The real stdout; whatever libraries print goes to stderr from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--gguf", default="", help="the weights as a GGUF file")
    parser.add_argument("--hf", default="", help="the same weights as a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    out = private_stdout()
    package, start = ENGINES[args.engine]
    run, settings = start(args)
    version = importlib.metadata.version(package)
    print(json.dumps({"ready": True, "version": version, "settings": {**settings}}, default=str), file=out, flush=True)

    def handle(given: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        run(given["prompts"], given["tokens"])
        return {"seconds": time.perf_counter() - began}

    answer(sys.stdin, out, handle)


if __name__ == "__main__":
    main()
