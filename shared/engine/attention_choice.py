"""Which attention serves a model on this machine: the first of the fastest that is installed and passes its trial."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from shared.engine.batch import AttentionBackend
from shared.engine.config import EngineConfig
from shared.engine.errors import EngineError
from shared.engine.kernel_attention import KernelAttention
from shared.engine.kv_cache import KVCache
from shared.engine.loader import LoadedModel
from shared.engine.torch_attention import TorchAttention

_FLASH_BLOCK_TOKENS = 256
"""Block length of which flash-attn's paged cache takes multiples only."""


@dataclass(frozen=True)
class Candidate:
    """An attention that could serve. `make` raises ImportError or EngineError when it cannot be had here after all."""

    name: str
    make: Callable[[KVCache], AttentionBackend]
    on_trial: bool
    """Whether its numbers are tried at load. Those that every CPU test runs through need no trial."""


def attention_candidates(model: LoadedModel, config: EngineConfig) -> list[Candidate]:
    """What the configuration allows on its device, best first."""
    heads, positions = model.query_heads, model.context_length

    def make_triton(cache: KVCache) -> AttentionBackend:
        _require("triton")
        from shared.engine.triton_attention import TritonAttention  # noqa: PLC0415 - needs triton

        return TritonAttention(cache, heads, positions)

    def make_flash(cache: KVCache) -> AttentionBackend:
        for module in ("triton", "flash_attn"):
            _require(module)
        if cache.block_tokens % _FLASH_BLOCK_TOKENS:
            raise EngineError(f"flash-attn reads blocks of {_FLASH_BLOCK_TOKENS} tokens, not {cache.block_tokens}")
        from shared.engine.flash_attention import FlashAttention  # noqa: PLC0415 - needs flash-attn

        return FlashAttention(cache, heads, positions)

    known = [
        Candidate("kernels", lambda cache: KernelAttention(cache, heads, config.threads), on_trial=False),
        Candidate("torch", lambda cache: TorchAttention(cache, heads, positions), on_trial=False),
        Candidate("triton", make_triton, on_trial=True),
        Candidate("flash", make_flash, on_trial=True),
    ]
    names: list[str] = [config.attention]
    if config.attention == "auto":
        on_cuda = ["triton", "torch"] if config.exactness == "exact" else ["flash", "triton", "torch"]
        names = ["kernels"] if config.device == "cpu" else on_cuda
    return [candidate for name in names for candidate in known if candidate.name == name]


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise EngineError(f"{module} is not installed")
