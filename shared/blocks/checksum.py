"""The checksum of a block: xxh3-64, made where the block is computed and verified where it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import xxhash

from shared.transport import Buffer, Connection, copy_to_host, host_view, is_device, n_bytes

INLINE_BYTES: Final = 16 << 20
"""Up to this many bytes are hashed on the event loop (a millisecond or two); more go to a thread."""


def checksum(buffer: Buffer) -> int:
    """xxh3-64 of the buffer's bytes, 10 GB/s and more. Device memory is copied to the host for it.

    The copy waits for what the device has been given to do before, so keep it off the event loop. Raises UnusableBuffer
    when the memory is not contiguous.
    """
    return xxhash.xxh3_64_intdigest(host_view(copy_to_host(buffer) if is_device(buffer) else buffer))


async def checksums(buffers: Sequence[Buffer]) -> list[int]:
    """The checksum of each buffer, without holding up the event loop."""
    on_host = not any(is_device(buffer) for buffer in buffers)
    if on_host and sum(n_bytes(buffer) for buffer in buffers) <= INLINE_BYTES:
        return [checksum(buffer) for buffer in buffers]
    return await asyncio.to_thread(lambda: [checksum(buffer) for buffer in buffers])


async def receive_hashed(connection: Connection, buffers: Sequence[Buffer]) -> list[int]:
    """Fill the buffers in order and answer the checksum of each. One block is hashed while the next ones arrive, except
    in device memory.

    Raises like `Connection.receive_buffers`.
    """
    if any(is_device(buffer) for buffer in buffers):
        await connection.receive_buffers(buffers)
        return await checksums(buffers)
    sums = [0] * len(buffers)

    def hash_one(number: int) -> None:
        sums[number] = checksum(buffers[number])

    await connection.receive_buffers(buffers, hash_one)
    return sums
