"""A decoder as separate stages over packed rows; attention itself lives in `engine.attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvblend.engine.config import ModelConfig
from kvblend.engine.linear import linear
from kvblend.engine.rope import RopeBook
from kvblend.engine.weights import ModelWeights


class Model:
    """Stages of one decoder. Rows of several sequences may stand in one call: a stage sees rows, not sequences.

    Shapes: `hidden [rows, hidden_size]`; q `[rows, num_heads, head_dim]`; k and v `[rows, num_kv_heads, head_dim]`,
    k un-rotated (but normed, where the model norms heads). All in the model's dtype. `ropes` has the tables.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.ropes = RopeBook(config, self.dtype, self.device)
        self.scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        # transformers rounds the scale to the model's dtype
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self._activate = _gelu_tanh if config.activation == "gelu_tanh" else F.silu
        self._q_width = config.num_heads * config.head_dim
        self._kv_width = config.num_kv_heads * config.head_dim

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.config.num_layers

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input of layer 0 for `token_ids` (int64 `[rows]`)."""
        embedded = F.embedding(token_ids, self.weights.embedding)
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm and QKV projection of one layer: q, un-rotated k, v (views of one buffer where heads are not normed)."""
        w, c = self.weights.layers[layer], self.config
        fused = linear(self._norm(hidden, w.attention_norm), w.qkv, w.qkv_bias)
        rows = hidden.shape[0]
        q, k, v = fused.split((self._q_width, self._kv_width, self._kv_width), dim=1)
        q, k = q.view(rows, c.num_heads, c.head_dim), k.view(rows, c.num_kv_heads, c.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._norm(q, w.q_norm), self._norm(k, w.k_norm)
        return q, k, v.view(rows, c.num_kv_heads, c.head_dim)

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, residual and MLP: the layer's output for rows whose attention is `[rows, heads * dim]`."""
        w = self.weights.layers[layer]
        if w.post_attention_norm is not None:
            hidden = hidden + self._norm(F.linear(attended, w.output, w.output_bias), w.post_attention_norm)
        elif w.output_bias is None:
            hidden = torch.addmm(hidden, attended, w.output.t())
        else:
            hidden = hidden + F.linear(attended, w.output, w.output_bias)
        gate, up = linear(self._norm(hidden, w.mlp_norm), w.gate_up, w.gate_up_bias).chunk(2, dim=1)
        inner = self._activate(gate).mul_(up)
        if w.post_mlp_norm is not None:
            return hidden + self._norm(F.linear(inner, w.down, w.down_bias), w.post_mlp_norm)
        if w.down_bias is None:
            # a tensor of this call's own by now
            return hidden.addmm_(inner, w.down.t())
        return hidden + F.linear(inner, w.down, w.down_bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits `[rows, vocab_size]` of the last layer's output."""
        return linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if hidden.dtype in (torch.float32, torch.float64):
            return F.rms_norm(hidden, (hidden.shape[-1],), weight, self.config.rms_norm_eps)
        wide = F.rms_norm(hidden.float(), (hidden.shape[-1],), None, self.config.rms_norm_eps)
        if weight.dtype == torch.float32:
            return (wide * weight).to(hidden.dtype)
        return wide.to(hidden.dtype) * weight


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")
