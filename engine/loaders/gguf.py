"""Models in GGUF files: the tensors' names and the order of rotated rows, as the engine wants them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.config import BadModelFile
from kvblend.engine.loaders.gguf_config import ROPE_FACTORS, read_config
from kvblend.engine.loaders.gguf_fields import Fields
from kvblend.engine.loaders.gguf_file import GGUFFile
from kvblend.engine.loaders.gguf_tokenizer import build_tokenizer
from kvblend.engine.loaders.source import ModelSource
from kvblend.engine.weights import check_names

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
# with norms behind attention and MLP, Hugging Face calls the norm before the MLP by another name
_POST_NORM_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@contextmanager
def open_gguf(path: Path) -> Iterator[ModelSource]:
    """Open a GGUF file of one of `ARCHITECTURES`; its `read` works inside the `with` block only.

    Raises BadModelFile or UnsupportedModel, naming the file and what is wrong.
    """
    with GGUFFile(path) as file:
        config = read_config(file)
        names = {to_hf_name(name, config.post_norms): name for name in file.tensors if not _is_aside(name)}
        interleaved = file.metadata["general.architecture"] == "llama"
        try:
            check_names(config, {name: file.tensors[own].shape for name, own in names.items()})
        except BadModelFile as error:
            raise BadModelFile(f"{path}: {error}") from None

        def read(name: str) -> torch.Tensor:
            tensor = torch.from_numpy(file.read(names[name]))
            if interleaved and ".q_proj." in name:
                return to_half_split(tensor, config.num_heads)
            if interleaved and ".k_proj." in name:
                return to_half_split(tensor, config.num_kv_heads)
            return tensor

        tokenizer = build_tokenizer(path, file.metadata, config.eos_ids)
        template = ChatTemplate(
            Fields(path, file.metadata).get("tokenizer.chat_template", str, "") or None,
            bos=tokenizer.text_of(tokenizer.bos_id),
            eos=tokenizer.text_of(config.eos_ids[0] if config.eos_ids else None),
        )
        yield ModelSource(config, tokenizer, template, (path,), read)


def to_hf_name(name: str, post_norms: bool = False) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its name, to be reported as unexpected.

    `post_norms`: whether the model norms the outputs of attention and MLP.
    """
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    own = _LAYER_NAMES | _POST_NORM_NAMES if post_norms else _LAYER_NAMES
    if match is None or match[2] not in own:
        return name
    return f"model.layers.{match[1]}.{own[match[2]]}.{match[3]}"


def to_half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the interleaving of q or k rows (`[heads * head_dim, ...]`).

    Files of the `llama` architecture pair rotated rows 2i and 2i+1 within a head; the engine pairs i and i +
    head_dim/2, as do files of the other architectures.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _is_aside(name: str) -> bool:
    return name == ROPE_FACTORS or _LEFTOVER.fullmatch(name) is not None
