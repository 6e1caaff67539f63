"""The CPU kernels (cpu.c) as functions of torch tensors. A call hands over addresses and nothing is checked there, so
the callers keep to shapes, strides and fp32.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shared.engine.errors import EngineError
from shared.engine.kernels.build import source_number, variants

_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64
_Float = ctypes.c_float

_SIGNATURES: dict[str, list[type]] = {
    "hr_rms_norm": [_Pointer, _Pointer, _Pointer, _Float, _Pointer, _Size, _Size],
    "hr_norm_heads": [_Pointer, _Pointer, _Float, _Size, _Size, _Size, _Size],
    "hr_silu_mul": [_Pointer, _Pointer, _Size, _Size],
    "hr_unit_rows": [_Pointer, _Pointer, _Pointer, _Size, _Size],
    "hr_scale_rows": [_Pointer, _Pointer, _Pointer, _Size, _Size],
    "hr_rotate": [_Pointer, _Pointer, _Pointer, _Size, _Size, _Size, _Size, _Size],
    "hr_write_kv": [_Pointer, _Pointer, _Pointer, _Pointer, _Size, _Size],
    "hr_linear_half": [_Pointer, _Pointer, _Pointer, _Pointer, _Size, _Size, _Size],
    "hr_attend": [_Pointer, _Pointer, _Pointer, _Size, _Size, _Pointer, _Size, _Size],
}

_BYTE_PRODUCTS = [_Pointer] * 8 + [_Size] * 3
"""Of `hr_linear_bytes`, which is there for some processors only."""

FLOAT_BYTES = 4


class LayerCache(ctypes.Structure):
    """The paged cache of one layer, and how it attends (`layer_t`). `block_stride` counts bytes."""

    _fields_ = (
        ("keys", _Pointer),
        ("values", _Pointer),
        ("element_bytes", _Size),
        ("block_tokens", _Size),
        ("block_stride", _Size),
        ("kv_heads", _Size),
        ("head_dim", _Size),
        ("share", _Size),
        ("window", _Size),
        ("scaling", _Float),
        ("softcap", _Float),
    )


class _Sequences(ctypes.Structure):
    _fields_ = (
        ("sequences", _Pointer),
        ("blocks", _Pointer),
        ("n", _Size),
        ("scratch", _Pointer),
        ("scratch_stride", _Size),
    )


class SequenceTable:
    """Which rows of a batch belong to which sequence, and where its blocks are (`batch_t`). Owns what it points to."""

    def __init__(self, sequences: NDArray[np.int64], blocks: NDArray[np.int64], scratch: NDArray[np.float32]) -> None:
        """`sequences` [n, 4]: first row, new tokens, position of the first of them, offset into `blocks`.

        `scratch` [threads, floats]
        """
        self._arrays = (sequences, blocks, scratch)
        self.work = int((sequences[:, 1] * (sequences[:, 1] + sequences[:, 2])).sum())
        """Pairs of a new token and a token that it may see."""
        self._struct = _Sequences(
            sequences.ctypes.data, blocks.ctypes.data, len(sequences), scratch.ctypes.data, scratch.shape[1]
        )
        self.address = ctypes.addressof(self._struct)


def has_byte_products() -> bool:
    """Whether `hr_linear_bytes` runs on this processor (AVX-512 VNNI)."""
    try:
        return bool(library().hr_has_byte_products())
    except EngineError:
        return False


def path_of(name: str) -> Path:
    return Path(__file__).with_name(name)


def best_variant() -> str:
    """The library for this processor. Raises EngineError when it has none of the instructions needed."""
    names = list(variants())
    capability = torch.backends.cpu.get_cpu_capability()
    if names == ["cpu_v4.so", "cpu_v3.so"]:
        if capability not in ("AVX2", "AVX512"):
            raise EngineError(f"this processor offers {capability}; the CPU engine needs AVX2 and FMA")
        return names[0] if capability == "AVX512" else names[1]
    return names[0]


@cache
def library(name: str | None = None) -> ctypes.CDLL:
    """The compiled kernels, by default those for this processor.

    Raises EngineError when they were not built, or from another source: a call would hand over the wrong arguments.
    """
    path = path_of(name or best_variant())
    if not path.is_file():
        raise EngineError(f"the CPU kernels are missing ({path.name}); install the package again: make install")
    loaded = ctypes.CDLL(str(path))
    number = getattr(loaded, "hr_source", lambda: -1)
    if number() & 0xFFFFFFFF != source_number():
        raise EngineError(f"{path.name} was compiled from another cpu.c; install the package again: make install")
    for function, arguments in _SIGNATURES.items():
        getattr(loaded, function).argtypes = arguments
        getattr(loaded, function).restype = None
    loaded.hr_has_byte_products.argtypes = []
    loaded.hr_has_byte_products.restype = ctypes.c_int32
    if loaded.hr_has_byte_products():
        loaded.hr_linear_bytes.argtypes = _BYTE_PRODUCTS
        loaded.hr_linear_bytes.restype = None
    loaded.hr_attend_scratch.argtypes = [_Size, _Size]
    loaded.hr_attend_scratch.restype = _Size
    return loaded
