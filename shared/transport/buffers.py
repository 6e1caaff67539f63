"""What may be sent and received into: contiguous host memory, or device memory on a transport that reaches it."""

from __future__ import annotations

import math
from typing import Any

from shared.transport.errors import UnusableBuffer

Buffer = Any
"""Anything with the buffer protocol, or with `__cuda_array_interface__` (such as a torch tensor on a GPU)."""


def is_device(buffer: Buffer) -> bool:
    """Whether the bytes lie in the memory of a CUDA device."""
    return hasattr(buffer, "__cuda_array_interface__")


def n_bytes(buffer: Buffer) -> int:
    """Size in bytes. Raises UnusableBuffer."""
    if not is_device(buffer):
        return host_view(buffer).nbytes
    interface = buffer.__cuda_array_interface__
    return int(math.prod(interface["shape"])) * int(interface["typestr"][2:])


def host_view(buffer: Buffer, *, writable: bool = False) -> memoryview:
    """The buffer as flat bytes, without a copy. Raises UnusableBuffer for device memory, gaps and read-only memory."""
    if is_device(buffer):
        raise UnusableBuffer("device memory has no view on the host; only UCX moves it without a copy")
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise UnusableBuffer(f"{type(buffer).__name__} exposes no buffer") from error
    if not view.c_contiguous:
        raise UnusableBuffer("the buffer has gaps; only contiguous memory can be moved")
    if writable and view.readonly:
        raise UnusableBuffer("the buffer is read-only")
    return view.cast("B")


def copy_to_host(buffer: Buffer) -> Buffer:
    """Host memory with the bytes of a torch tensor on a GPU. Waits for what the device has still to do before."""
    return buffer.cpu().numpy()


def copy_to_device(data: bytearray, buffer: Buffer) -> None:
    """Overwrite a torch tensor on a GPU, uint8 and of the same size."""
    import torch  # noqa: PLC0415 - only those who have a GPU have torch for certain

    buffer.copy_(torch.frombuffer(data, dtype=torch.uint8).view(buffer.shape))
    # The copy is queued on the device; who is told that a buffer is full may use it from anywhere.
    buffer[:1].cpu()


def check_buffer(buffer: Buffer, *, writable: bool) -> Buffer:
    """The buffer as UCX takes it. UCX itself would move the wrong bytes of a strided array without a word."""
    if not is_device(buffer):
        return host_view(buffer, writable=writable)
    interface = buffer.__cuda_array_interface__
    if interface.get("strides") is not None and not _dense(interface):
        raise UnusableBuffer("the device buffer has gaps; only contiguous memory can be moved")
    if writable and interface["data"][1]:
        raise UnusableBuffer("the device buffer is read-only")
    return buffer


def _dense(interface: dict[str, Any]) -> bool:
    expected = int(interface["typestr"][2:])
    for length, stride in zip(reversed(interface["shape"]), reversed(interface["strides"]), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= int(length)
    return True
