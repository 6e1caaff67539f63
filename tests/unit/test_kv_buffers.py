"""Which memory may be moved, and the environment that UCX is started in."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from shared.transport import UnusableBuffer, host_view, is_device, is_loopback, n_bytes
from shared.transport.buffers import check_buffer
from shared.transport.ucx_environment import ucx_environment


class DeviceMemory:
    """What a tensor on a GPU shows of itself."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, read_only: bool = False) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": "<f2",
            "data": (0x7F0000000000, read_only),
            "strides": strides,
            "version": 3,
        }


@pytest.mark.parametrize("buffer", [bytearray(10), np.zeros((2, 5), np.uint8), memoryview(bytearray(10))])
def test_contiguous_memory_is_seen_without_a_copy(buffer: Any) -> None:
    view = host_view(buffer, writable=True)
    view[3] = 7
    assert view.nbytes == 10
    assert bytes(host_view(buffer))[3] == 7


def test_other_types_are_seen_as_bytes() -> None:
    assert n_bytes(np.zeros((2, 3, 4), np.float32)) == 96


@pytest.mark.parametrize("buffer", [np.zeros((4, 4))[:, 1], np.zeros((4, 4)).T, object(), 5])
def test_gaps_and_things_without_memory_are_refused(buffer: Any) -> None:
    with pytest.raises(UnusableBuffer):
        check_buffer(buffer, writable=False)


def test_read_only_memory_is_refused_where_it_must_be_written() -> None:
    assert check_buffer(b"abc", writable=False) == b"abc"
    with pytest.raises(UnusableBuffer):
        check_buffer(b"abc", writable=True)
    with pytest.raises(UnusableBuffer):
        check_buffer(DeviceMemory((4,), read_only=True), writable=True)


def test_device_memory_goes_to_ucx_as_it_is_and_not_elsewhere() -> None:
    memory = DeviceMemory((2, 30, 32, 3, 64))
    assert is_device(memory)
    assert n_bytes(memory) == 2 * 30 * 32 * 3 * 64 * 2
    assert check_buffer(memory, writable=True) is memory
    with pytest.raises(UnusableBuffer):
        host_view(memory)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((4, 8), (16, 2), True),
        ((1, 8), (999, 2), True),
        ((4, 8), (32, 2), False),
        ((4, 8), (2, 8), False),
        ((4,), (4,), False),
    ],
)
def test_device_memory_with_gaps_is_refused(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    memory = DeviceMemory(shape, strides)
    if dense:
        assert check_buffer(memory, writable=True) is memory
    else:
        with pytest.raises(UnusableBuffer):
            check_buffer(memory, writable=True)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.1.2.3", False), ("kv-1", False)],
)
def test_loopback_is_told_from_the_network(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_ucx_is_kept_on_loopback_only_when_the_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with ucx_environment("127.0.0.1", 9):
        assert os.environ["UCX_NET_DEVICES"].startswith("lo")
    with ucx_environment("0.0.0.0", 9):
        assert "UCX_NET_DEVICES" not in os.environ


def test_what_the_user_set_for_ucx_stays_and_what_we_set_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_LOG_LEVEL", "debug")
    before = dict(os.environ)
    with ucx_environment("127.0.0.1", 9):
        assert os.environ["UCX_TLS"] == "tcp"
        assert "UCX_LOG_FILE" not in os.environ
        assert os.environ["UCX_POSIX_ERROR_HANDLING"] == "y"
    assert dict(os.environ) == before
