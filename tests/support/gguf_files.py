"""Models of Hugging Face directories as GGUF files, written as converters write them, and transformers on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from model_files import CHATML, SPECIAL, tokenizer_json

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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


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
    architecture = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in _metadata(config, fields).items():
        _add_field(writer, name, value)
    tensors = load_file(directory / "model.safetensors")
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    for name, tensor in tensors.items():
        own = gguf_name(name, architecture)
        if own in skip:
            continue
        values = tensor.float().numpy()
        if architecture == "gemma3" and own.endswith("norm.weight"):
            values = values + 1.0
        heads = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
        if (part := f".{own.split('.')[-2]}.") in heads and architecture == "llama":
            values = interleave(values, config[heads[part]])
        kind = (kinds or {}).get(own.split(".")[-2], Kind.F32) if values.ndim > 1 else Kind.F32
        writer.add_tensor(own, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, architecture: str = "llama") -> str:
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
    names = _GGUF_NAMES | _GEMMA_NAMES if architecture == "gemma3" else _GGUF_NAMES
    return f"blk.{layer}.{names[stem]}.{suffix}"


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
    own = config["model_type"].removesuffix("_text")
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    fields: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": rope["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in source["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    if own != "llama":
        fields["llama.attention.key_length"] = config.get("head_dim") or config["hidden_size"] // 4
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {f"llama.rope.scaling.{ours}": rope[theirs] for ours, theirs in _SCALING.items() if theirs in rope}
    if own == "gemma3":
        fields["llama.attention.sliding_window"] = config["sliding_window"]
        marks = [kind == "sliding_attention" for kind in config["layer_types"]]
        fields["llama.attention.sliding_window_pattern"] = marks
    fields = {name.replace("llama.", f"{own}."): value for name, value in fields.items()}
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


def reference_from_gguf(path: Path) -> Any:
    """transformers' model, float32, with a GGUF file's weights as the `gguf` package reads and dequantises them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    reader = gguf.GGUFReader(path)
    found = {name: f.contents() for name, f in reader.fields.items() if len(f.data) == 1}
    architecture = found["general.architecture"]
    fields = {name.removeprefix(f"{architecture}."): value for name, value in found.items()}
    tensors = {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    gemma = architecture == "gemma3"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields["rope.freq_base"]}
    options = {"head_dim": fields["attention.key_length"]} if "attention.key_length" in fields else {}
    if gemma:
        options |= {"query_pre_attn_scalar": options["head_dim"], "sliding_window": fields["attention.sliding_window"]}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    config = AutoConfig.for_model(
        "gemma3_text" if gemma else architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=fields["attention.head_count"],
        num_key_value_heads=fields["attention.head_count_kv"],
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in tensors,
        **options,
    )
    factory: Any = AutoModelForCausalLM
    model: Any = factory.from_config(config, dtype=torch.float32)
    model.eval()
    state = model.state_dict()
    for name, target in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensors.pop(gguf_name(name, architecture))
        for letter, count in {"q": config.num_attention_heads, "k": config.num_key_value_heads}.items():
            if f".{letter}_proj." in name and architecture == "llama":
                values = deinterleave(values, count)
        target.copy_(torch.from_numpy(values) - float(gemma and name.endswith("norm.weight")))
    assert not tensors
    return model
