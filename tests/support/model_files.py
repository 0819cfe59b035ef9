"""Tiny models as files (Hugging Face directories, GGUF) and plain dense runs of a loaded model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

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
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
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


def reference_from_gguf(path: Path) -> Any:
    """transformers' model, float32, with a GGUF file's weights as the `gguf` package reads and dequantises them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    fields = {name.removeprefix("llama."): f.contents() for name, f in reader.fields.items() if len(f.data) == 1}
    tensors = {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    heads = {"q": fields["attention.head_count"], "k": fields["attention.head_count_kv"]}
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=heads["q"],
        num_key_value_heads=heads["k"],
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in tensors,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    state = model.state_dict()
    for name, target in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensors.pop(gguf_name(name))
        for letter, count in heads.items():
            if f".{letter}_proj." in name:
                values = deinterleave(values, count)
        target.copy_(torch.from_numpy(values))
    assert not tensors
    return model


@torch.inference_mode()
def dense_logits(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of the engine's stages with plain causal attention between them."""
    config, rows = model.config, len(ids)
    hidden = model.embed(torch.tensor(ids))
    cos, sin = (t[:, None, :] for t in model.rope.gather(torch.arange(rows)))
    group = config.num_heads // config.num_kv_heads
    for layer in range(model.num_layers):
        q, k, v = model.project(layer, hidden)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=model.scale
        )
        hidden = model.finish(layer, hidden, attended.transpose(0, 1).reshape(rows, -1))
    return model.logits(hidden)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest |value|."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def write_gguf(
    path: Path,
    directory: Path,
    kinds: Mapping[str, Kind] | None = None,
    skip: Sequence[str] = (),
    factors: Sequence[float] = (),
    **fields: Any,
) -> Path:
    """The model of a Hugging Face directory as a GGUF file, as converters write it.

    `kinds` chooses tensor types by the last part of a GGUF name (`ffn_up`); `fields` replaces metadata, dots written as
    two underscores, None leaves a field out.
    """
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in _metadata(config, fields).items():
        _add_field(writer, name, value)
    tensors = load_file(directory / "model.safetensors")
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    for name, tensor in tensors.items():
        own = gguf_name(name)
        if own in skip:
            continue
        values = tensor.float().numpy()
        if ".attn_q." in own:
            values = interleave(values, config["num_attention_heads"])
        if ".attn_k." in own:
            values = interleave(values, config["num_key_value_heads"])
        kind = (kinds or {}).get(own.split(".")[-2], Kind.F32) if values.ndim > 1 else Kind.F32
        writer.add_tensor(own, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    _, _, layer, rest = name.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[stem]}.{suffix}"


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row i and row i + head_dim/2 of every head side by side: the order rotated rows have in GGUF files."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        block = rows[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = block[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = block[size // 2 :]
    return out


def deinterleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The inverse of `interleave`."""
    blocks = np.split(rows, heads)
    return np.concatenate([part for block in blocks for part in (block[::2], block[1::2])])


def _metadata(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    source = json.loads(tokenizer_json())
    tokens = sorted(source["model"]["vocab"], key=source["model"]["vocab"].get)
    fields: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in source["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    fields.update({name.replace("__", "."): value for name, value in changes.items()})
    return {name: value for name, value in fields.items() if value is not None}


def _add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_uint32(name, value)
