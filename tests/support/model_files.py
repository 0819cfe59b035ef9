"""Tiny models as Hugging Face directories and plain dense runs of a loaded model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F

from kvblend.engine.attention.base import visible_keys
from kvblend.engine.model import Model
from kvblend.engine.rope import rotate

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@cache
def tokenizer_json() -> str:
    """A byte-level BPE of at most 320 tokens, trained on the spot; the same every time."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the river and the mill were the old heart of the town; when the water rose, the wheel turned all night"
    tokenizer.train_from_iterator([text] * 3, trainer)
    return str(tokenizer.to_str())


def save_llama(path: Path, *, seed: int = 0, shard: str = "5GB", **changes: Any) -> Path:
    """A seeded random Llama in a directory, written by transformers, with a tokenizer and a ChatML template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**_SIZES, **changes}))
    for name, parameter in model.named_parameters():
        # transformers starts norms at one and biases at zero: that would hide a forgotten one
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.2)
    model.save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text(tokenizer_json())
    settings = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "add_bos_token": False, "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def edit_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    data = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def reference_logits(path: Path, ids: Sequence[int], **options: Any) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    model.eval()
    with torch.no_grad():
        return torch.as_tensor(model(torch.tensor([ids])).logits[0])


@torch.inference_mode()
def dense_logits(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of the engine's stages with plain causal attention between them."""
    config, rows = model.config, len(ids)
    hidden = model.embed(torch.tensor(ids))
    turns = [[t[:, None, :] for t in table.gather(torch.arange(rows))] for table in model.ropes.tables(rows, rows)]
    group = config.num_heads // config.num_kv_heads
    for layer in range(model.num_layers):
        q, k, v = model.project(layer, hidden)
        cos, sin = turns[config.windowed(layer)]
        window = config.window_of(layer, rows)
        mask = visible_keys(torch.arange(rows), 0, rows, window)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=model.scale
        )
        hidden = model.finish(layer, hidden, attended.transpose(0, 1).reshape(rows, -1))
    return model.logits(hidden)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest |value|."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
