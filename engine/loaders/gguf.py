"""Llama models in GGUF files: names, sizes, RoPE and the order of rotated rows, as the engine wants them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.config import BadModelFile, ModelConfig, RopeConfig, UnsupportedModel
from kvblend.engine.loaders.gguf_file import GGUFFile
from kvblend.engine.loaders.gguf_tokenizer import build_tokenizer
from kvblend.engine.loaders.source import ModelSource
from kvblend.engine.weights import check_names

T = TypeVar("T", int, float, str)

ROPE_FACTORS = "rope_freqs.weight"
# tables some converters left behind; they repeat what the metadata says
_LEFTOVER = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@contextmanager
def open_gguf(path: Path) -> Iterator[ModelSource]:
    """Open a GGUF file of the `llama` architecture; its `read` works inside the `with` block only.

    Raises BadModelFile or UnsupportedModel, naming the file and what is wrong.
    """
    with GGUFFile(path) as file:
        config = read_config(file)
        names = {to_hf_name(name): name for name in file.tensors if not _is_aside(name)}
        try:
            check_names(config, {name: file.tensors[own].shape for name, own in names.items()})
        except BadModelFile as error:
            raise BadModelFile(f"{path}: {error}") from None

        def read(name: str) -> torch.Tensor:
            tensor = torch.from_numpy(file.read(names[name]))
            if ".q_proj." in name:
                return to_half_split(tensor, config.num_heads)
            if ".k_proj." in name:
                return to_half_split(tensor, config.num_kv_heads)
            return tensor

        tokenizer = build_tokenizer(path, file.metadata, config.eos_ids)
        template = ChatTemplate(
            _text(file, "tokenizer.chat_template"),
            bos=tokenizer.text_of(tokenizer.bos_id),
            eos=tokenizer.text_of(config.eos_ids[0] if config.eos_ids else None),
        )
        yield ModelSource(config, tokenizer, template, (path,), read)


def to_hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its name, to be reported as unexpected."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def to_half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the interleaving of q or k rows (`[heads * head_dim, ...]`).

    GGUF files of this architecture pair rotated rows 2i and 2i+1 within a head; the engine pairs i and i + head_dim/2.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's sizes from the metadata and the tensors' shapes."""
    fields = _Fields(file.path, file.metadata)
    architecture = fields.get("general.architecture", str, "")
    if architecture != "llama":
        raise UnsupportedModel(f"{file.path}: architecture {architecture!r} is not supported; supported: llama")
    if experts := fields.get("llama.expert_count", int, 0):
        raise UnsupportedModel(f"{file.path}: a mixture of {experts} experts is not supported")
    heads = fields.need("llama.attention.head_count", int)
    hidden = fields.need("llama.embedding_length", int)
    if heads < 1:
        raise BadModelFile(f"{file.path}: llama.attention.head_count is {heads}; it must be at least 1")
    head_dim = fields.get("llama.attention.key_length", int, hidden // heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (other := fields.get(name, int, head_dim)) != head_dim:
            raise UnsupportedModel(f"{file.path}: {name} is {other}; only the head size {head_dim} is supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise BadModelFile(f"{file.path}: missing tensors: token_embd.weight")
    bos = fields.get("tokenizer.ggml.bos_token_id", int, -1)
    eos = (fields.get(f"tokenizer.ggml.{kind}_token_id", int, -1) for kind in ("eos", "eot", "eom"))
    try:
        return ModelConfig(
            num_layers=fields.need("llama.block_count", int),
            hidden_size=hidden,
            intermediate_size=fields.need("llama.feed_forward_length", int),
            num_heads=heads,
            num_kv_heads=fields.get("llama.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0],
            context_length=fields.need("llama.context_length", int),
            rms_norm_eps=fields.need("llama.attention.layer_norm_rms_epsilon", float),
            rope=_read_rope(file, fields),
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            bos_id=bos if bos >= 0 else None,
            eos_ids=tuple(dict.fromkeys(i for i in eos if i >= 0)),
        )
    except (BadModelFile, UnsupportedModel) as error:
        raise type(error)(f"{file.path}: {error}") from None


def _read_rope(file: GGUFFile, fields: _Fields) -> RopeConfig:
    theta = fields.get("llama.rope.freq_base", float, 10000.0)
    # two spellings: converters of 2023 wrote the second
    scaling = fields.get("llama.rope.scaling.type", str, "none")
    linear = fields.get("llama.rope.scale_linear", float, 1.0)
    if scaling not in ("none", "") or linear != 1.0:
        name = scaling if scaling not in ("none", "") else "linear"
        raise UnsupportedModel(f"RoPE scaling {name!r} is not supported; supported: none, llama3 ({ROPE_FACTORS})")
    if ROPE_FACTORS not in file.tensors:
        return RopeConfig(theta=theta)
    factors = tuple(float(f) for f in file.read(ROPE_FACTORS).reshape(-1))
    if not all(0.0 < f < float("inf") for f in factors):
        raise BadModelFile(f"{ROPE_FACTORS} holds a factor that is not a positive number")
    return RopeConfig(theta=theta, kind="llama3", freq_factors=factors)


def _is_aside(name: str) -> bool:
    return name == ROPE_FACTORS or _LEFTOVER.fullmatch(name) is not None


def _text(file: GGUFFile, name: str) -> str | None:
    return _Fields(file.path, file.metadata).get(name, str, "") or None


class _Fields:
    """Typed access to metadata; a missing or mistyped field is a BadModelFile that names it."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def need(self, name: str, kind: type[T]) -> T:
        if name not in self.values:
            raise BadModelFile(f"{self.path}: the field {name} is missing")
        return self.get(name, kind, kind())

    def get(self, name: str, kind: type[T], default: T) -> T:
        value = self.values.get(name, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadModelFile(f"{self.path}: the field {name} is {value!r}; it must be of type {kind.__name__}")
        return value
