"""A store that fails its peers in one chosen way, once: `python -m tests.integration.kv_liar KIND PORT SECRET`.

The way is written into the keys of the blocks (`key_of`), so one process serves all tests. The first exchange about a
family of keys goes wrong; every later one is right, so that a client which kept a broken connection would show it.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import numpy as np
import numpy.typing as npt
import uvloop

from shared.protocol.kv import Doubt, Get, Held, Put, Request, Sending, Verdicts, decode_request, encode_kv
from shared.transport import Connection, Listener, pick_transport

SIZE = 500_000
LATE_S = 0.8

GET_FAULTS = ("cut", "hang", "late", "silent", "short", "long", "reversed", "fewer", "garbage", "extra")
PUT_FAULTS = ("cut", "hang", "silent", "fewer", "garbage")


def key_of(fault: str, family: int, number: int) -> bytes:
    return fault.encode().ljust(8, b"\0") + family.to_bytes(4, "big") + number.to_bytes(4, "big")


def content(key: bytes) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(list(key)).integers(0, 256, SIZE, dtype=np.uint8)


class Liar:
    def __init__(self) -> None:
        self._failed: set[bytes] = set()

    async def serve(self, connection: Connection) -> None:
        while True:
            request = decode_request(await connection.receive_header())
            family = _first_key(request)[:12]
            fault = family[:8].rstrip(b"\0").decode() if family not in self._failed else ""
            if isinstance(request, Get | Put):
                self._failed.add(family)
            if not await self._answer(connection, request, fault):
                return

    async def _answer(self, connection: Connection, request: Request, fault: str) -> bool:
        """False to hang up."""
        match request:
            case Get() | Put() if fault in ("silent", "garbage", "fewer"):
                answer = b"\xc1" if fault == "garbage" else encode_kv(_too_short(request))
                if fault == "silent":
                    await asyncio.sleep(3600)
                await connection.send_header(answer)
                return True
            case Get():
                await connection.send_header(encode_kv(Sending([True] * len(request.blocks))))
                return await _send(connection, [content(block.key) for block in request.blocks], fault)
            case Put():
                await connection.send_header(encode_kv(Verdicts(["want"] * len(request.blocks))))
                return await _receive(connection, len(request.blocks), fault)
            case Doubt():
                await connection.send_header(encode_kv(Held([True] * len(request.keys))))
                return True
        raise AssertionError(f"no test asks for {request}")


async def _send(connection: Connection, buffers: list[npt.NDArray[np.uint8]], fault: str) -> bool:
    match fault:
        case "cut":
            await connection.send_buffers(buffers[:1])
            return False
        case "hang":
            await connection.send_buffers(buffers[:1])
            await asyncio.sleep(3600)
        case "late":
            await connection.send_buffers(buffers[:1])
            await asyncio.sleep(LATE_S)
            await connection.send_buffers(buffers[1:])
        case "short":
            await connection.send_buffers([np.ascontiguousarray(buffer[:-1]) for buffer in buffers])
        case "long":
            await connection.send_buffers([np.append(buffer, np.uint8(0)) for buffer in buffers])
        case "reversed":
            await connection.send_buffers(buffers[::-1])
        case "extra":
            await connection.send_buffers([*buffers, buffers[0]])
            print("extra sent", flush=True)
        case _:
            await connection.send_buffers(buffers)
    return True


async def _receive(connection: Connection, count: int, fault: str) -> bool:
    into = [np.zeros(SIZE, np.uint8) for _ in range(count)]
    if fault in ("cut", "hang"):
        await connection.receive_buffers(into[:1])
        await asyncio.sleep(3600 if fault == "hang" else 0)
        return False
    await connection.receive_buffers(into)
    await connection.send_header(encode_kv(Verdicts(["stored"] * count)))
    return True


def _first_key(request: Request) -> bytes:
    if isinstance(request, Get | Put):
        return request.blocks[0].key
    return request.keys[0] if isinstance(request, Doubt) else b""


def _too_short(request: Get | Put) -> Sending | Verdicts:
    return Sending([True]) if isinstance(request, Get) else Verdicts(["stored"])


async def main(kind: str, port: int, secret: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    transport = pick_transport("ucx" if kind == "ucx" else "tcp")
    try:
        async with Listener(transport, Liar().serve, secret.encode(), host="127.0.0.1", port=port):
            await stop.wait()
    finally:
        await transport.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
