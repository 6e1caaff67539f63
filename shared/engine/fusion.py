"""Puts fused decoder layers where a trial shows that they compute what the model's own layers compute.

Each half of a layer is compared by what enters its last product, which both forms reach through the same products: so
the comparison is tight, in 8 bits too, and leaves out the residual stream, whose few huge numbers hide all else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shared.engine.batch import AttentionShape
from shared.engine.fused_layer import FusedDecoderLayer, is_fusable
from shared.engine.kernel_attention import KernelAttention

_PART_TOLERANCE = 1e-5
"""Largest difference of what enters a half's last product, relative to the row's largest number. Both forms differ in
the rounding of an activation only."""

_WHOLE_TOLERANCE = {"fp32": 1e-4, "fp16-packed": 1e-3, "int8": 5e-2}
"""The same for what a layer adds to its input, where 8-bit inputs of the products may round to neighbouring steps."""

_ROUNDING = 1e-6
"""Of the input's own size: what is lost when it is subtracted again."""


@dataclass
class _Seen:
    """What one decoder layer was given and gave in the trial."""

    x: torch.Tensor
    keywords: dict[str, Any]
    out: torch.Tensor


class FusionTrial:
    """Watches the trial forward, then replaces layers. `watch` before the forward, `unwatch` after it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers = [m for m in module.modules() if is_fusable(m)]
        self._seen: dict[nn.Module, _Seen] = {}
        self._entered: dict[nn.Module, torch.Tensor] = {}
        """Inputs of each layer's `o_proj`, `mlp` and `down_proj`."""
        self._hooks: list[RemovableHandle] = []

    def watch(self) -> None:
        def note_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            plain = len(args) == 1 and isinstance(output, torch.Tensor)
            if plain and args[0].dtype == torch.float32 and args[0].is_contiguous() and args[0].shape[0] == 1:
                self._seen[layer] = _Seen(args[0].clone(), kwargs, output.clone())

        def note_input(part: nn.Module, args: tuple[Any, ...]) -> None:
            self._entered[part] = args[0].clone()

        for layer in self._layers:
            self._hooks.append(layer.register_forward_hook(note_layer, with_kwargs=True))
            for part in _watched_parts(layer):
                self._hooks.append(part.register_forward_pre_hook(note_input))

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def fuse(self, shapes: dict[int, AttentionShape], backend: KernelAttention, dtype: str) -> list[tuple[Any, ...]]:
        """Replace what can be; (parent, name, the layer that was there) of each. `shapes` by layer number."""
        replaced: list[tuple[Any, ...]] = []
        for parent in list(self._module.modules()):
            for name, layer in list(parent.named_children()):
                if layer not in self._seen or any(part not in self._entered for part in _watched_parts(layer)):
                    continue
                number = int(layer.self_attn.layer_idx)  # type: ignore[union-attr, arg-type]
                candidate = FusedDecoderLayer(layer, number, shapes[number], backend)
                if self._agrees(layer, candidate, dtype):
                    setattr(parent, name, candidate)
                    replaced.append((parent, name, layer))
        return replaced

    def _agrees(self, layer: nn.Module, candidate: FusedDecoderLayer, dtype: str) -> bool:
        seen = self._seen[layer]
        output, mlp, down = (self._entered[part] for part in _watched_parts(layer))
        attended = candidate.attend(seen.x, **seen.keywords)
        return (
            _near(attended, output, _PART_TOLERANCE)
            and _near(candidate.activate(mlp), down, _PART_TOLERANCE)
            and _near(
                candidate(seen.x.clone(), **seen.keywords) - seen.x,
                seen.out - seen.x,
                _WHOLE_TOLERANCE[dtype],
                beside=_ROUNDING * seen.x.abs().amax(-1),
            )
        )


def _watched_parts(layer: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    return layer.self_attn.o_proj, layer.mlp, layer.mlp.down_proj


def _near(found: torch.Tensor, expected: torch.Tensor, tolerance: float, beside: torch.Tensor | float = 0.0) -> bool:
    """Whether each row differs by at most `tolerance` of its largest number and `beside` [1, rows]. NaN is far."""
    allowed = tolerance * expected.abs().amax(-1) + beside
    return found.shape == expected.shape and bool(((found - expected).abs().amax(-1) <= allowed).all())
