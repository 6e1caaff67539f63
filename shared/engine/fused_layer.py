"""Decoder layers of the Llama family in ten calls: else a small model's step on CPU is spent between its products.

Layers are recognised by their parts here and replaced only after a trial (`fusion`). All others run through
Transformers' own code.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from shared.engine.batch import AttentionShape, Batch
from shared.engine.kernel_attention import KernelAttention
from shared.engine.kernels import FLOAT_BYTES, library
from shared.engine.norms import KernelRMSNorm
from shared.engine.packed_linear import FusedPart


class FusedDecoderLayer(nn.Module):
    """`x += attention(norm(x))`, then `x += down(silu(gate) * up)` of `norm(x)`: pre-norm (Llama, Mistral, Qwen)."""

    def __init__(self, layer: Any, number: int, shape: AttentionShape, backend: KernelAttention) -> None:
        """`layer` has the parts that `is_fusable` asks for. Weights are shared with it, not copied."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm, self.key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.qkv, self.output = attention.q_proj.product, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.product, mlp.down_proj
        self._attention = backend
        cache = backend.layer_cache(number, shape)
        self._cache = ctypes.addressof(cache)
        self._head_dim = cache.head_dim
        self._query_heads = cache.kv_heads * cache.share
        self._kv_heads = cache.kv_heads
        self._hidden = self.attention_norm.weight.numel()
        self._inner = mlp.gate_proj.width
        self._kernels = library()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[1, rows, hidden] -> the same tensor, changed. Keywords as a decoder layer of Transformers gets them."""
        x = hidden_states.contiguous()
        out = self.output(self.attend(x, **kwargs))
        normed = self._norm(self.mlp_norm, x, out)
        added: torch.Tensor = self.down(self.activate(normed))
        return x.add_(added)

    def attend(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[1, rows, hidden] -> what enters the attention's last product: [1, rows, query_heads * head_dim]"""
        batch: Batch = kwargs["headrace_batch"]
        cos, sin = kwargs["position_embeddings"]
        kernels, head_dim, rows = self._kernels, self._head_dim, x.shape[1]
        qkv = self.qkv(self._norm(self.attention_norm, x, None))
        width = qkv.shape[2]
        q = qkv.data_ptr()
        k = q + self._query_heads * head_dim * FLOAT_BYTES
        v = k + self._kv_heads * head_dim * FLOAT_BYTES
        for part, heads, norm in ((q, self._query_heads, self.query_norm), (k, self._kv_heads, self.key_norm)):
            if norm is not None:
                kernels.hr_norm_heads(part, norm.weight.data_ptr(), norm.eps, rows, width, heads, head_dim)
        heads = self._query_heads + self._kv_heads
        kernels.hr_rotate(q, cos.data_ptr(), sin.data_ptr(), rows, width, heads, head_dim, cos.shape[-1])
        kernels.hr_write_kv(self._cache, batch.plan.address, k, v, width, head_dim)
        out: torch.Tensor = qkv.new_zeros((1, rows, self._query_heads * head_dim))
        self._attention.attend_stored(self._cache, batch.plan, q, width, head_dim, out.data_ptr())
        return out

    def activate(self, normed: torch.Tensor) -> torch.Tensor:
        """[1, rows, hidden] -> what enters the last product: [1, rows, inner]"""
        rows = normed.shape[1]
        gate_up = self.gate_up(normed)
        inner = normed.new_empty((1, rows, self._inner))
        self._kernels.hr_silu_mul(gate_up.data_ptr(), inner.data_ptr(), rows, self._inner)
        return inner

    def _norm(self, norm: Any, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The norm of `x`, to which `delta` is added first, in place."""
        normed = torch.empty_like(x)
        added = None if delta is None else delta.data_ptr()
        self._kernels.hr_rms_norm(
            x.data_ptr(), added, norm.weight.data_ptr(), norm.eps, normed.data_ptr(), x.shape[1], self._hidden
        )
        return normed


def is_fusable(layer: nn.Module) -> bool:
    """Whether the layer has the parts of a FusedDecoderLayer; what it does with them is for a trial to show."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    norms += [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    first, gate = getattr(attention, "q_proj", None), getattr(mlp, "gate_proj", None)
    return (
        all(isinstance(norm, KernelRMSNorm) for norm in norms)
        and isinstance(first, FusedPart)
        and isinstance(gate, FusedPart)
        and isinstance(getattr(attention, "o_proj", None), nn.Module)
        and isinstance(getattr(mlp, "down_proj", None), nn.Module)
    )
