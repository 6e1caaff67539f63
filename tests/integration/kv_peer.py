"""A peer of the transport tests, in a process of its own: `python -m tests.integration.kv_peer KIND PORT SECRET`.

Obeys one command per header: `echo N BYTES` receives N buffers and sends them back; `send N BYTES` sends N buffers;
`half N BYTES` sends one buffer of N and waits; `die N BYTES` sends one buffer of N and kills itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np
import uvloop

from shared.transport import Connection, Listener, pick_transport


def pattern(number: int, size: int) -> np.ndarray:
    """What the peer sends as buffer `number`."""
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


async def obey(connection: Connection) -> None:
    while True:
        verb, count, size = (await connection.receive_header()).decode().split()
        n, n_bytes = int(count), int(size)
        buffers = [pattern(i, n_bytes) for i in range(n)]
        if verb == "echo":
            received = [np.zeros(n_bytes, np.uint8) for _ in range(n)]
            await connection.receive_buffers(received)
            await connection.send_buffers(received)
        elif verb == "send":
            await connection.send_buffers(buffers)
        else:
            await connection.send_buffers(buffers[:1])
            if verb == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(3600)


async def serve(kind: str, port: int, secret: str, max_connections: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    transport = pick_transport("ucx" if kind == "ucx" else "tcp")
    try:
        async with Listener(
            transport, obey, secret.encode(), host="127.0.0.1", port=port, max_connections=max_connections
        ):
            await stop.wait()
    finally:
        await transport.close()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
