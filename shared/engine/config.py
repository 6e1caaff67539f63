"""What an engine needs to know before it loads a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["fp16-packed", "int8", "fp32", "bf16"]
Attention = Literal["auto", "kernels", "torch", "triton", "flash"]
Exactness = Literal["exact", "fast"]


@dataclass(frozen=True)
class EngineConfig:
    """`dtype` names the path of the matrix products: on CPU `fp16-packed`, `int8` or `fp32`, on CUDA `bf16` or `fp32`.
    `attention` chooses who attends: `kernels` of ours (CPU only), plain `torch` operations, kernels in `triton` (CUDA;
    on CPU only in Triton's interpreter, for tests), the `flash`-attn package (CUDA, `fast`), or with `auto` the best of
    them that the machine has. `exactness` `fast` (CUDA only) gives up that a row's bits do not depend on the batch:
    products and attention take whatever kernel is quickest for the batch as it stands. `cuda_graphs` captures decode
    steps and verifications at load, so that the host starts one graph instead of hundreds of kernels.

    `max_batch_tokens` bounds the tokens of one forward, `max_running` the sequences that take part in a step,
    `max_draft_tokens` the drafted rows of one sequence in a step, `kv_memory_bytes` the memory of the paged cache.
    `adaptive_drafts` verifies as many drafts as pay by what was measured, else all that fit.
    `prefix_caching` keeps the blocks of ended sequences for those that begin alike, until others need the room.
    """

    model_path: Path
    model_name: str
    fingerprint: str
    kv_memory_bytes: int
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Dtype = "fp16-packed"
    attention: Attention = "auto"
    exactness: Exactness = "exact"
    cuda_graphs: bool = True
    threads: int = 1
    block_tokens: int = 32
    max_batch_tokens: int = 256
    max_running: int = 16
    max_draft_tokens: int = 8
    adaptive_drafts: bool = True
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field."""
        for name in ("kv_memory_bytes", "threads", "block_tokens", "max_batch_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must not be negative, got {self.max_draft_tokens}")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running}), "
                "else some sequences would never decode"
            )
        if self.attention == "kernels" and self.device != "cpu":
            raise ValueError("attention 'kernels' runs on cpu only; use 'auto'")
        if self.exactness == "fast" and self.device != "cuda":
            raise ValueError("exactness 'fast' is for cuda only; on cpu all is exact")
        if self.attention == "flash" and self.exactness != "fast":
            raise ValueError("attention 'flash' is not exact; it needs exactness 'fast'")
        if self.attention == "triton" and self.device == "cpu" and self.dtype != "fp32":
            raise ValueError("attention 'triton' runs on cpu in Triton's interpreter only, with dtype 'fp32'")
        allowed = {"cpu": ("fp16-packed", "int8", "fp32"), "cuda": ("bf16", "fp32")}[self.device]
        if self.dtype not in allowed:
            raise ValueError(f"dtype {self.dtype!r} does not run on {self.device}; choose from {', '.join(allowed)}")
