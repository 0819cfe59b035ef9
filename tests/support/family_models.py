"""Tiny seeded models of every family, written by transformers, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from model_files import CHATML, SPECIAL, VOCAB, tokenizer_json

ORIGINAL, CONTEXT, WINDOW = 64, 256, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {**YARN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT, LONG = [1.0 + 0.02 * i for i in range(8)], [1.0 + 0.6 * i for i in range(8)]


def longrope(width: int, original: int = ORIGINAL, **more: Any) -> dict[str, Any]:
    """RoPE fields with `width` factors, told apart well enough to show a swap."""
    parts = {"short_factor": SHORT[:width], "long_factor": LONG[:width], "original_max_position_embeddings": original}
    return {"rope_type": "longrope", "rope_theta": 1e4, **parts, **more}


def _phi3(original: int, **rope: Any) -> dict[str, Any]:
    return {"original_max_position_embeddings": original, "rope_parameters": rope}


# name -> (model type, changes of SIZES); prompts of the tests are longer than WINDOW and ORIGINAL
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama dynamic": (
        "llama",
        {
            "max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 8.0, "truncate": False}},
    ),
    "llama yarn attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama longrope": ("llama", {"rope_parameters": longrope(8, factor=4.0)}),
    "yi": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral null": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3 bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 windows": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3 partial": ("phi3", _phi3(CONTEXT, rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "phi3 long": ("phi3", _phi3(ORIGINAL, **longrope(8))),
    "phi3 long, partial": ("phi3", _phi3(ORIGINAL, **longrope(6, partial_rotary_factor=0.75))),
    "phi3 short": ("phi3", _phi3(CONTEXT - 4, **longrope(8, CONTEXT - 4, factor=2.0))),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    ),
    "gemma3 linear": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
WINDOWED = ("mistral", "qwen2 windows", "qwen3 windows", "phi3", "gemma3", "gemma3 linear")
SCALED = tuple(name for name, (_, changes) in VARIANTS.items() if "rope_parameters" in changes and name != "yi")


def save_family(path: Path, name: str, seed: int = 0) -> Path:
    """The variant's model in a directory, with a tokenizer and a ChatML template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = VARIANTS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **json.loads(json.dumps(changes))})
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        # transformers starts norms and biases at values that change nothing: that would hide a forgotten one
        if parameter_name.endswith(("norm.weight", "bias")):
            plain = parameter_name.endswith("weight") and kind != "gemma3_text"
            torch.nn.init.normal_(parameter, mean=float(plain), std=0.2)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json())
    settings = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "add_bos_token": False, "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@cache
def open_reference(path: Path) -> Any:
    """transformers' model of a directory, float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def their_logits(path: Path, ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of one forward pass of transformers."""
    with torch.no_grad():
        return torch.as_tensor(open_reference(path)(torch.tensor([ids])).logits[0])


def their_answer(path: Path, ids: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens behind `ids`, end tokens taken like any other."""
    inputs = torch.tensor([ids])
    with torch.no_grad():
        found = open_reference(path).generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in found[0, len(ids) :]]
