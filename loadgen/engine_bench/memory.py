"""How much memory this process holds, and how much of it the weights are."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from torch import nn

from loadgen.engine_bench.errors import MeasurementError
from shared.engine.packed_linear import ByteLinear, HalfLinear, Int8Linear, PackedLinear

_FP16_BLOCK = (16, 512)
"""fbgemm keeps fp16 weights in blocks of so many outputs and inputs and fills the last ones up: 576 inputs take the
room of 1,024. (Confirmed by the growth of a process.) Its int8 blocks are filled up too, but pages of filling are not
touched where a matrix is large, so it is not counted: in what is held beside the weights it shows."""

_SCALE_BYTES = 4


class Resident(msgspec.Struct, frozen=True):
    """Bytes in main memory: now (private ones, and pages of files and libraries), and at most so far."""

    private: int
    files: int
    most: int

    @property
    def now(self) -> int:
        return self.private + self.files


def resident() -> Resident:
    """The kernel's own figures for this program: what a parent used is not in them.

    Raises MeasurementError where there is no /proc.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise MeasurementError("memory is read from /proc/self/status, which this system lacks") from error
    fields = dict(line.partition(":")[::2] for line in lines)
    private, files, most = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM"))
    return Resident(private, files, most)


class Weights(msgspec.Struct, frozen=True):
    """Bytes: of the numbers alone, and with the blocks that they are packed in."""

    plain: int
    held: int


def weight_bytes(module: nn.Module) -> Weights:
    """Of all that `module` holds: parameters and buffers, each once, and packed weights."""
    plain = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    padding = 0
    for layer in module.modules():
        if isinstance(layer, HalfLinear):
            unfilled = layer.panels.nbytes - 2 * layer.out_features * layer.in_features
            plain -= unfilled
            padding += unfilled
        elif isinstance(layer, PackedLinear):
            sizes = (layer.out_features, layer.in_features)
            filled = [-(-n // block) * block for n, block in zip(sizes, _FP16_BLOCK, strict=True)]
            plain += 2 * math.prod(sizes)
            padding += 2 * (math.prod(filled) - math.prod(sizes))
        elif isinstance(layer, ByteLinear):
            held = layer.panels.nbytes + layer.scales.nbytes + layer.sums.nbytes
            needed = layer.out_features * (layer.in_features + _SCALE_BYTES)
            plain -= held - needed
            padding += held - needed
        elif isinstance(layer, Int8Linear):
            plain += layer.out_features * (layer.in_features + _SCALE_BYTES)
    return Weights(plain, plain + padding)
