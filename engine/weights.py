"""Weights of a decoder in the form the stages use: projections fused where they share an input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvblend.engine.config import BadModelFile, ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv [(heads + 2 kv_heads) * head_dim, hidden]`, `gate_up [2 * intermediate, hidden]`.

    `q_norm` and `k_norm` `[head_dim]` where the model norms heads; the two `post_` norms where it norms outputs.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights; `head` is the embedding itself where the model ties them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


# one name means another norm where outputs are normed too: behind attention, not before the MLP
MLP_NORM = {False: "post_attention_layernorm", True: "pre_feedforward_layernorm"}
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def _output_biased(config: ModelConfig) -> bool:
    return config.attention_bias if config.output_bias is None else config.output_bias


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the architecture under its Hugging Face name, with its shape."""
    h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for layer in range(config.num_layers):
        p = f"model.layers.{layer}."
        for name in ("input_layernorm", MLP_NORM[config.post_norms], *(POST_NORMS if config.post_norms else ())):
            shapes[f"{p}{name}.weight"] = (h,)
        if config.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (d,)
        for name, rows, columns, biased in (
            ("self_attn.q_proj", q, h, config.attention_bias),
            ("self_attn.k_proj", kv, h, config.attention_bias),
            ("self_attn.v_proj", kv, h, config.attention_bias),
            ("self_attn.o_proj", h, q, _output_biased(config)),
            ("mlp.gate_proj", f, h, config.mlp_bias),
            ("mlp.up_proj", f, h, config.mlp_bias),
            ("mlp.down_proj", h, f, config.mlp_bias),
        ):
            shapes[p + name + ".weight"] = (rows, columns)
            if biased:
                shapes[p + name + ".bias"] = (rows,)
    return shapes


def check_names(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a file's tensors with the architecture's; BadModelFile names what is missing, extra or misshapen."""
    want = expected_shapes(config)
    missing = sorted(set(want) - set(shapes))
    extra = sorted(set(shapes) - set(want))
    wrong = sorted(n for n in set(want) & set(shapes) if tuple(shapes[n]) != want[n])
    problems = [f"missing tensors: {_some(missing)}"] if missing else []
    problems += [f"unexpected tensors: {_some(extra)}"] if extra else []
    problems += [f"{n} has shape {list(shapes[n])}, expected {list(want[n])}" for n in wrong[:4]]
    if problems:
        raise BadModelFile("; ".join(problems))


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def build_weights(
    config: ModelConfig, read: Callable[[str], torch.Tensor], dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Assemble the fused weights from `read(name)`; names must have passed `check_names`.

    Tensors are read one at a time, so that beside the result no second copy of the model is held. Norm weights of
    models with `post_norms` stay at least float32: they are applied before rounding there, and hold a folded 1.
    """
    norm_dtype = torch.promote_types(dtype, torch.float32) if config.post_norms else dtype

    def take(name: str) -> torch.Tensor:
        return read(name).to(device=device, dtype=dtype)

    def norm(name: str) -> torch.Tensor:
        return read(name + ".weight").to(device=device, dtype=norm_dtype)

    def fuse(prefix: str, names: tuple[str, ...], suffix: str) -> torch.Tensor:
        return torch.cat([take(f"{prefix}{n}.{suffix}") for n in names]).contiguous()

    layers = []
    for index in range(config.num_layers):
        p = f"model.layers.{index}."
        qkv, gate_up = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
        layers.append(
            LayerWeights(
                attention_norm=norm(p + "input_layernorm"),
                qkv=fuse(p, qkv, "weight"),
                qkv_bias=fuse(p, qkv, "bias") if config.attention_bias else None,
                output=take(p + "self_attn.o_proj.weight"),
                output_bias=take(p + "self_attn.o_proj.bias") if _output_biased(config) else None,
                mlp_norm=norm(p + MLP_NORM[config.post_norms]),
                gate_up=fuse(p, gate_up, "weight"),
                gate_up_bias=fuse(p, gate_up, "bias") if config.mlp_bias else None,
                down=take(p + "mlp.down_proj.weight"),
                down_bias=take(p + "mlp.down_proj.bias") if config.mlp_bias else None,
                q_norm=norm(p + "self_attn.q_norm") if config.qk_norm else None,
                k_norm=norm(p + "self_attn.k_norm") if config.qk_norm else None,
                post_attention_norm=norm(p + POST_NORMS[0]) if config.post_norms else None,
                post_mlp_norm=norm(p + POST_NORMS[1]) if config.post_norms else None,
            )
        )
    embedding = take("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else take("lm_head.weight")
    return ModelWeights(embedding, tuple(layers), norm("model.norm"), head)
