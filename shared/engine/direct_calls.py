"""Shortens the way from a module to its children, which a small model spends much of a decode step on."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Direct:
    """Stands for a leaf module: a call goes straight to `forward`, past all checks for hooks; else it is the module."""

    __slots__ = ("_forward", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward = module.forward

    def __call__(self, x: Any) -> Any:
        return self._forward(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def call_directly(model: nn.Module, leaves: tuple[type[nn.Module], ...]) -> None:
    """Put each child where plain attribute access finds it, and call those of the types `leaves` without hooks.

    Do this last: a child that is replaced, moved or hooked afterwards would not be seen.
    """
    for parent in model.modules():
        for name, child in parent.named_children():
            parent.__dict__[name] = _Direct(child) if isinstance(child, leaves) else child
