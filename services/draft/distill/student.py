"""The draft model in training: the target's own architecture with few layers, its embedding and head frozen.

The layers begin as chosen ones of the target. Weights are read by their names in the target's safetensors files, so
that a target that is much larger than its draft is never in memory as a whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.draft.distill.errors import DistillError

_LAYER = re.compile(r"(?<=\.layers\.)(\d+)(?=\.)")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PROOF_TOKENS = 37
_PROOF_TOLERANCE = 1e-3
"""Largest difference, relative to the largest logit, between the model's logits and a plain product with its head."""


@dataclass
class Student:
    """`module` is a Transformers model; `trained` are its parameters by name, all but the target's own (`shared`)."""

    module: nn.Module
    config: Any
    trained: dict[str, nn.Parameter]
    shared: list[str]

    @property
    def head(self) -> torch.Tensor:
        """[vocabulary, hidden], frozen."""
        head: torch.Tensor = self.module.get_output_embeddings().weight  # type: ignore[operator]
        return head

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """[texts, length] -> [texts, length, hidden], what the head reads. Texts may be padded on the right."""
        states: torch.Tensor = self.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state  # type: ignore[operator]
        return states


def target_config(path: Path) -> Any:
    """Raises DistillError for a target that no small copy can be made of."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DistillError(f"no usable model configuration in {path}: {error}") from error
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        raise DistillError(
            f"model type {config.model_type!r} is a mixture of experts, whose layers make no small draft"
        )
    if config.get_text_config(decoder=True) is not config:
        raise DistillError(f"model type {config.model_type!r} nests its text model, and cannot be distilled yet")
    return config


def make_student(path: Path, layers: Sequence[int], device: str = "cpu") -> Student:
    """A student that starts from `layers` of the target in `path`. Raises DistillError."""
    config = student_config(target_config(path), layers)
    module = _new_module(config)
    loaded = module.load_state_dict(_weights(path, layers), strict=False)
    module.tie_weights()
    tied = set(getattr(module, "all_tied_weights_keys", {}) or {})
    missing = [name for name in loaded.missing_keys if name not in tied]
    if missing or loaded.unexpected_keys:
        raise DistillError(
            f"the weights in {path} have other names than model type {config.model_type!r} expects: "
            f"{', '.join([*missing, *loaded.unexpected_keys][:3])}"
        )
    module.requires_grad_(False)
    own = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    own |= {id(p) for p in module.get_output_embeddings().parameters()}
    trained = {name: p for name, p in module.named_parameters() if id(p) not in own}
    for parameter in trained.values():
        parameter.requires_grad_(True)
    shared = [name for name, p in module.named_parameters() if id(p) in own]
    student = Student(module.to(device).eval(), config, trained, shared)
    _prove(student)
    return student


def _new_module(config: Any) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError:  # a kind that attends in a way of its own
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def student_config(config: Any, layers: Sequence[int]) -> Any:
    """The target's configuration with `layers` only. Fields with one entry for each layer keep those of the chosen."""
    total = config.num_hidden_layers
    if any(not 0 <= layer < total for layer in layers):
        raise DistillError(f"the target has {total} layers; a draft needs fewer")
    chosen = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == total:
            setattr(chosen, name, [value[layer] for layer in layers])
    chosen.num_hidden_layers = len(layers)
    return chosen


def _weights(path: Path, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    """The target's weights under the student's names, fp32."""
    numbers = {old: new for new, old in enumerate(layers)}
    if len(numbers) < len(layers):
        raise DistillError("each layer of the target can be taken once only")
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                if (layer := _LAYER.search(name)) is None:
                    found[name] = weights.get_tensor(name).float()
                elif int(layer[1]) in numbers:
                    found[_LAYER.sub(str(numbers[int(layer[1])]), name, count=1)] = weights.get_tensor(name).float()
    return found


@torch.inference_mode()
def _prove(student: Student) -> None:
    """The training multiplies with rows of the head; that must be all that the model does behind its layers."""
    device = student.head.device
    tokens = torch.arange(_PROOF_TOKENS, device=device)[None] % student.head.shape[0]
    expected = student.module(input_ids=tokens, use_cache=False).logits[0].float()
    found = student.hidden(tokens)[0] @ student.head.T
    if (expected - found).abs().max() > _PROOF_TOLERANCE * expected.abs().max():
        raise DistillError(
            f"model type {student.config.model_type!r} does more behind its layers than multiply with its head; "
            "it cannot be distilled yet"
        )


def count_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
