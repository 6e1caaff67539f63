"""Checks once, at load, that each layer attends as paged attention does: heads of one shape, and either all earlier
tokens visible or a window of them.

Transformers gives a custom attention no mask, so that a model with another pattern (later tokens, chunks, a window that
only its mask knows of) would silently give other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from shared.engine.attention import BATCH_KEY
from shared.engine.errors import UnsupportedModel

_NAME = "headrace_check"
_RULE = "headrace_rule"
"""Attribute of a mask: the function of (batch, head, query position, key position) that says what is visible."""

_TOKENS = 3


@dataclass
class AttentionShape:
    """What all layers have in common. `positions` bounds where a token may stand."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    positions: int


@dataclass
class _Observed:
    """Travels through the forward in place of a batch."""

    shape: AttentionShape
    layers: list[int] = field(default_factory=list)


def check_attention(module: nn.Module, model_type: str, shape: AttentionShape) -> None:
    """Run a few tokens and compare what each attention is given with `shape`, and its mask with the window it is told.

    Raises UnsupportedModel, naming `model_type`.
    """
    observed = _Observed(shape)
    AttentionInterface.register(_NAME, _judge)
    AttentionMaskInterface.register(_NAME, _make_mask)
    config: Any = module.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    ids = torch.zeros((1, _TOKENS), dtype=torch.long)
    try:
        module.base_model(  # type: ignore[operator]
            input_ids=ids,
            position_ids=torch.arange(_TOKENS)[None],
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            **{BATCH_KEY: observed},
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"model type {model_type!r} is not served: {error}") from error
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(
            f"model type {model_type!r} does not run through the attention interface: {reason}"
        ) from error
    finally:
        config._attn_implementation = before
    if sorted(observed.layers) != list(range(shape.layers)):
        raise UnsupportedModel(
            f"model type {model_type!r} is not served: its {shape.layers} layers use Transformers' attention interface "
            f"{len(observed.layers)} times, not once each"
        )


def _make_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **kwargs: Any
) -> torch.Tensor:
    mask = torch.zeros((1, 1, q_length, kv_length), dtype=torch.bool)
    setattr(mask, _RULE, mask_function)
    return mask


def _judge(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stands for the attention. Its result is of the right shape and means nothing."""
    kind = type(module).__name__
    if BATCH_KEY not in kwargs:
        raise UnsupportedModel(f"{kind} gets no keywords from its model")
    observed: _Observed = kwargs[BATCH_KEY]
    observed.layers.append(int(module.layer_idx))  # type: ignore[arg-type]
    shape = observed.shape
    heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
    if any(t.shape != (1, n, _TOKENS, shape.head_dim) for t, n in zip((query, key, value), heads, strict=True)):
        raise UnsupportedModel(f"{kind} has heads of another number or size than its configuration says")
    rule = getattr(attention_mask, _RULE, None)
    if rule is None:
        raise UnsupportedModel(f"{kind} has {'no mask' if attention_mask is None else 'a mask of its own'}")
    points = _telling_positions(shape.positions, sliding_window)
    q, k, zero = points[:, None], points[None, :], torch.zeros((), dtype=torch.long)
    expected = k <= q if sliding_window is None else (k <= q) & (k > q - sliding_window)
    if not torch.equal(rule(zero, zero, q, k).expand_as(expected), expected):
        told = "all earlier tokens" if sliding_window is None else f"the last {sliding_window} tokens"
        raise UnsupportedModel(f"{kind} looks at other tokens than {told}")
    return query.transpose(1, 2), None


def _telling_positions(positions: int, window: int | None) -> torch.Tensor:
    """Those around powers of two, around multiples of the window and at the end: where patterns have their edges."""
    edges = {0, positions} | {1 << n for n in range(positions.bit_length())}
    edges |= {n * window for n in range(1, 4)} if window else set()
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    return torch.tensor(sorted(p for p in near if 0 <= p < positions))
