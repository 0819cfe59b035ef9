"""The shape of a model from the metadata of its GGUF file, for every architecture that is read."""

from __future__ import annotations

from typing import Any

from kvblend.engine.config import BadModelFile, ModelConfig, RopeConfig, UnsupportedModel
from kvblend.engine.loaders.gguf_fields import Fields
from kvblend.engine.loaders.gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
"""What can stand in `general.architecture`."""

ROPE_FACTORS = "rope_freqs.weight"
_HEAD_NORMS = ("qwen3", "gemma3")
# what the format leaves unsaid of Gemma 3: every sixth layer sees all, the others turn with this base
_GEMMA_PERIOD = 6
_GEMMA_LOCAL_THETA = 10000.0
# the one size whose scores are not scaled by the size of its heads
_GEMMA_27B_LAYERS = 62


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's sizes and switches from the metadata and the tensors' names and shapes.

    UnsupportedModel names an architecture, rotation or other trait that is not executed; BadModelFile names a missing
    or mistyped field.
    """
    architecture = Fields(file.path, file.metadata).get("general.architecture", str, "")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    fields = Fields(file.path, file.metadata, f"{architecture}.")
    _refuse(fields)
    heads = fields.need("attention.head_count", int)
    hidden = fields.need("embedding_length", int)
    if heads < 1:
        raise BadModelFile(f"{file.path}: {fields.prefix}attention.head_count is {heads}; it must be at least 1")
    head_dim = fields.get("attention.key_length", int, hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := fields.get(name, int, head_dim)) != head_dim:
            raise UnsupportedModel(
                f"{file.path}: {fields.prefix}{name} is {other}; only the head size {head_dim} is supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise BadModelFile(f"{file.path}: missing tensors: token_embd.weight")
    biased = "blk.0.attn_q.bias" in file.tensors
    output_biased = "blk.0.attn_output.bias" in file.tensors
    try:
        layers = fields.need("block_count", int)
        return ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=fields.need("feed_forward_length", int),
            num_heads=heads,
            num_kv_heads=fields.get("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0],
            context_length=fields.need("context_length", int),
            rms_norm_eps=fields.need("attention.layer_norm_rms_epsilon", float),
            rope=_read_rope(file, fields),
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias=biased,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            output_bias=None if output_biased == biased else output_biased,
            qk_norm=architecture in _HEAD_NORMS,
            **_ends(Fields(file.path, file.metadata, "tokenizer.ggml.")),
            **(_gemma(fields, layers, hidden, heads) if architecture == "gemma3" else _window(fields)),
        )
    except (BadModelFile, UnsupportedModel) as error:
        if str(error).startswith(str(file.path)):
            raise
        raise type(error)(f"{file.path}: {error}") from None


def _refuse(fields: Fields) -> None:
    """Traits of other models that may stand in a file of a known architecture."""
    if experts := fields.get("expert_count", int, 0):
        raise UnsupportedModel(f"{fields.path}: a mixture of {experts} experts is not supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap := fields.get(name, float, 0.0):
            raise UnsupportedModel(f"{fields.path}: {fields.prefix}{name} is {cap:g}; only 0 (none) is supported")


def _ends(fields: Fields) -> dict[str, Any]:
    bos = fields.get("bos_token_id", int, -1)
    eos = (fields.get(f"{kind}_token_id", int, -1) for kind in ("eos", "eot", "eom"))
    return {"bos_id": bos if bos >= 0 else None, "eos_ids": tuple(dict.fromkeys(i for i in eos if i >= 0))}


def _window(fields: Fields) -> dict[str, Any]:
    window = fields.get("attention.sliding_window", int, 0)
    return {"sliding_window": window} if window > 0 else {}


def _gemma(fields: Fields, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """What makes a Gemma 3 of a Llama. The file's norm weights hold the 1 already."""
    name = "attention.sliding_window_pattern"
    pattern = fields.values.get(fields.prefix + name, _GEMMA_PERIOD)
    if isinstance(pattern, list) and all(isinstance(mark, bool) for mark in pattern):
        windowed = tuple(pattern)
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        windowed = tuple((layer + 1) % pattern != 0 for layer in range(layers))
    else:
        raise BadModelFile(
            f"{fields.prefix}{name} is {pattern!r}; it must be a number of at least 1 or a list of bools"
        )
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": hidden**0.5,
        "query_scale": (hidden / heads) ** -0.5 if layers == _GEMMA_27B_LAYERS else None,
        "sliding_window": fields.need("attention.sliding_window", int),
        "windowed_layers": windowed,
        "rope_local": RopeConfig(theta=fields.get("rope.freq_base_swa", float, _GEMMA_LOCAL_THETA)),
    }


def _read_rope(file: GGUFFile, fields: Fields) -> RopeConfig:
    theta = fields.get("rope.freq_base", float, 10000.0)
    if ROPE_FACTORS in file.tensors:
        factors = tuple(float(f) for f in file.read(ROPE_FACTORS).reshape(-1))
        if not all(0.0 < f < float("inf") for f in factors):
            raise BadModelFile(f"{ROPE_FACTORS} holds a factor that is not a positive number")
        return RopeConfig(theta=theta, kind="llama3", freq_factors=factors)
    kind = fields.get("rope.scaling.type", str, "none") or "none"
    # two spellings: converters of 2023 wrote the second
    linear = fields.get("rope.scale_linear", float, 1.0)
    if kind == "none" and linear == 1.0:
        return RopeConfig(theta=theta)
    factor = fields.get("rope.scaling.factor", float, linear)
    if kind in ("none", "linear"):
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        context = fields.get("rope.scaling.original_context_length", int, fields.need("context_length", int))
        return RopeConfig(theta=theta, kind="yarn", factor=factor, original_context=context)
    raise UnsupportedModel(
        f"RoPE scaling {kind!r} is not supported; supported: none, linear, yarn, llama3 ({ROPE_FACTORS})"
    )
