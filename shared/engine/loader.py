"""Reads a model directory through Transformers and prepares the modules for exact, fast forwards.

Safetensors only, no code from the model's repository. What cannot be served raises UnsupportedModel in one line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from shared.engine.activations import replace_activations
from shared.engine.attention import ATTENTION_NAME, register
from shared.engine.attention_check import AttentionShape, check_attention
from shared.engine.config import EngineConfig
from shared.engine.cuda_products import TiledLinear
from shared.engine.device_rotary import make_tables_whole
from shared.engine.errors import UnsupportedModel
from shared.engine.experts import replace_experts
from shared.engine.norms import replace_norms
from shared.engine.packed_linear import MakeLinear, linear_maker, plain_linear, replace_linears
from shared.engine.rotary import replace_rotary
from shared.models.drafts import HEAD_TOKENS, read_head_tokens
from shared.models.errors import ModelError
from shared.protocol.blocks import KVLayout

_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class LoadedModel:
    """`module(input_ids, position_ids, ...)` gives logits; `layout` still lacks the digest of the numerics.

    With a short head the logits are those of `head_tokens`, in this order.
    """

    module: nn.Module
    layout: KVLayout
    query_heads: int
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    head_tokens: NDArray[np.int64] | None = None


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises UnsupportedModel. Takes seconds: no compilation."""
    path = config.model_path
    register()
    try:
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UnsupportedModel(f"no usable model configuration in {path}: {_one_line(error)}") from error
    _check_config(hf_config)
    shape = _attention_shape(hf_config)
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    transformers.utils.logging.disable_progress_bar()
    try:
        module = AutoModelForCausalLM.from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise UnsupportedModel(
                f"model type {hf_config.model_type!r} does not use Transformers' attention interface"
            ) from error
        raise UnsupportedModel(f"cannot load {path}: {_one_line(error)}") from error
    module = module.eval().requires_grad_(False)
    text = hf_config.get_text_config(decoder=True)
    with torch.inference_mode(False), torch.no_grad():
        check_attention(module, str(hf_config.model_type), shape)
        _make_experts_exact(module, config, hf_config)
        head_tokens = _shorten_head(module, path, int(text.vocab_size))
        replace_linears(module, _linear_maker(config))
        if config.device == "cpu":
            replace_norms(module)
            replace_activations(module)
        positions = replace_rotary(module, str(hf_config.model_type), shape.positions)
        if config.device == "cuda":
            make_tables_whole(module)
    module = module.to(config.device)
    if config.dtype in ("fp16-packed", "int8"):
        _let_go_of_file(module)
    layout = KVLayout(
        model=config.model_name,
        fingerprint=config.fingerprint,
        kv_dtype=_kv_dtype(config),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_tokens=config.block_tokens,
        rope=_canonical_rope(text),
        numerics=f"{config.device}/{config.dtype}" + ("/fast" if config.exactness == "fast" else ""),
    )
    return LoadedModel(
        module=module,
        layout=layout,
        query_heads=shape.query_heads,
        vocab_size=int(text.vocab_size),
        context_length=positions,
        eos_token_ids=_eos_token_ids(config, hf_config),
        head_tokens=head_tokens,
    )


def _shorten_head(module: Any, path: Path, vocab_size: int) -> NDArray[np.int64] | None:
    """Where the model's directory names the tokens of a short head, let the head give logits for these only.

    For drafts, whose head is most of a step: FR-Spec (Zhao and others, 2025).
    """
    try:
        token_ids = read_head_tokens(path)
    except ModelError as error:
        raise UnsupportedModel(str(error)) from error
    if not token_ids:
        return None
    kept = np.unique(np.array(token_ids, np.int64))
    if kept[0] < 0 or kept[-1] >= vocab_size:
        raise UnsupportedModel(f"{path / HEAD_TOKENS} names tokens beyond the ids 0 .. {vocab_size - 1}")
    head = module.get_output_embeddings()
    short = nn.Linear(head.in_features, len(kept), bias=head.bias is not None, dtype=head.weight.dtype)
    rows = torch.from_numpy(kept)
    short.weight.copy_(head.weight[rows])
    if head.bias is not None:
        short.bias.copy_(head.bias[rows])
    module.set_output_embeddings(short.requires_grad_(False))
    return kept


def _let_go_of_file(module: nn.Module) -> None:
    """Copy what was not packed, so that the mapped file with all other weights leaves this process's memory.

    With unpacked weights the mapping is the better copy: workers on one machine share it.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _check_config(config: Any) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model type {kind!r} is an encoder-decoder; only decoder-only models are served")
    text = config.get_text_config(decoder=True)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"model type {kind!r} with quantized weights is not served; give unquantized ones")
    if getattr(text, "max_position_embeddings", None) is None:
        raise UnsupportedModel(f"model type {kind!r} does not say how many positions it has")


def _attention_shape(config: Any) -> AttentionShape:
    """Raises UnsupportedModel where the layers have no such shape in common."""
    text = config.get_text_config(decoder=True)
    try:
        query_heads = int(text.num_attention_heads)
        return AttentionShape(
            layers=int(text.num_hidden_layers),
            query_heads=query_heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or query_heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // query_heads),
            positions=int(text.max_position_embeddings),
        )
    except (AttributeError, RuntimeError, TypeError) as error:
        kind = config.model_type
        raise UnsupportedModel(
            f"model type {kind!r} does not give all layers attention heads of one shape: {_one_line(error)}"
        ) from error


def _make_experts_exact(module: nn.Module, config: EngineConfig, hf_config: Any) -> None:
    """Raises UnsupportedModel for a mixture of experts that is not understood."""
    kind, text = hf_config.model_type, hf_config.get_text_config(decoder=True)
    replaced = replace_experts(module, kind, _linear_maker(config), torch.device(config.device))
    if not replaced and any((getattr(text, name, None) or 0) > 1 for name in _EXPERT_FIELDS):
        raise UnsupportedModel(f"model type {kind!r} is a mixture of experts of a kind that is not served")


def _linear_maker(config: EngineConfig) -> MakeLinear:
    """How linear layers are held: packed on CPU, in row tiles on CUDA unless exactness was given up."""
    if config.device == "cpu":
        return linear_maker(config.dtype, config.threads)
    return TiledLinear if config.exactness == "exact" else plain_linear


def _kv_dtype(config: EngineConfig) -> str:
    """The KV cache is as exact as the weights; plain torch attention on CPU computes in what it reads."""
    if config.dtype == "bf16":
        return "bfloat16"
    return "float32" if config.dtype == "fp32" or config.attention == "torch" else "float16"


def _canonical_rope(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return json.dumps(rope, sort_keys=True, separators=(",", ":"), default=str) if rope else ""


def _eos_token_ids(config: EngineConfig, hf_config: Any) -> frozenset[int]:
    found: set[int] = set()
    sources = [hf_config]
    if (config.model_path / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(config.model_path, local_files_only=True))
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
