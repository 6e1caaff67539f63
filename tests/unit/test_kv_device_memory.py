"""Blocks in device memory: hashed through the host and off the event loop, moved over TCP by a detour."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import torch
import xxhash

from shared.blocks import checksum, checksums, receive_hashed
from shared.transport import UnusableBuffer, n_bytes
from shared.transport.stream import Stream
from shared.transport.tcp import TcpConnection


class DeviceBlock:
    """Looks like a torch tensor on a GPU; its bytes lie on the host. Notes which threads copied."""

    def __init__(self, size: int, seed: int = 0, strides: tuple[int, ...] | None = None) -> None:
        self.bytes = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        self.copied_in: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (0x7F0000000000, False),
            "strides": strides,
            "version": 3,
        }

    @property
    def shape(self) -> torch.Size:
        return self.bytes.shape

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self.bytes[at]

    def cpu(self) -> torch.Tensor:
        self.copied_in.append(threading.current_thread().name)
        return self.bytes.clone()

    def copy_(self, source: torch.Tensor) -> None:
        self.copied_in.append(threading.current_thread().name)
        self.hold.wait(10)
        self.bytes.copy_(source)


def raw(block: DeviceBlock) -> bytes:
    return block.bytes.numpy().tobytes()


def connections() -> tuple[TcpConnection, TcpConnection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return TcpConnection(Stream(left)), TcpConnection(Stream(right))


async def test_a_device_block_has_the_checksum_of_its_bytes_and_is_copied_off_the_event_loop() -> None:
    block = DeviceBlock(1000)
    assert checksum(block) == xxhash.xxh3_64_intdigest(raw(block))
    block.copied_in.clear()
    host = bytearray(raw(block))
    assert await checksums([block, host]) == [checksum(host)] * 2
    assert block.copied_in != []
    assert threading.main_thread().name not in block.copied_in


async def test_device_blocks_cross_tcp_between_host_blocks() -> None:
    sender, receiver = connections()
    sent = [DeviceBlock(70_000, seed=1), bytearray(b"host" * 100), DeviceBlock(33, seed=2)]
    into = [bytearray(70_000), DeviceBlock(400, seed=3), DeviceBlock(33, seed=4)]
    arrived: list[int] = []
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(sender.send_buffers(sent))
        tasks.create_task(receiver.receive_buffers(into, arrived.append))
    assert arrived == [0, 1, 2]
    assert [bytes(into[0]), raw(into[1]), raw(into[2])] == [raw(sent[0]), bytes(sent[1]), raw(sent[2])]
    for block in (sent[0], sent[2], into[1], into[2]):
        assert threading.main_thread().name not in block.copied_in
    sender.close()
    receiver.close()


async def test_received_device_blocks_are_hashed_off_the_event_loop() -> None:
    sender, receiver = connections()
    sent = [DeviceBlock(5000, seed=n) for n in range(3)]
    into = [DeviceBlock(5000, seed=9) for _ in range(3)]
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(sender.send_buffers(sent))
        sums = tasks.create_task(receive_hashed(receiver, into))
    assert sums.result() == [xxhash.xxh3_64_intdigest(raw(block)) for block in sent]
    assert all(threading.main_thread().name not in block.copied_in for block in into)
    sender.close()
    receiver.close()


async def test_a_cancelled_receive_leaves_no_thread_that_writes_to_the_device() -> None:
    sender, receiver = connections()
    block = DeviceBlock(100)
    block.hold.clear()
    await sender.send_buffers([bytearray(100)])
    task = asyncio.create_task(receiver.receive_buffers([block]))
    while not block.copied_in:
        await asyncio.sleep(0.005)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
    block.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert receiver.closed
    assert raw(block) == bytes(100)
    sender.close()


async def test_gaps_in_device_memory_are_refused_before_a_byte_is_sent() -> None:
    sender, receiver = connections()
    gaps = DeviceBlock(100, strides=(2,))
    assert n_bytes(gaps) == 100
    with pytest.raises(UnusableBuffer):
        await sender.send_buffers([bytearray(10), gaps])
    assert not receiver.usable_again()
    receiver.close()
