"""Measures the KV plane: GB/s of put and get beside a memcpy of the same size in the same run, for each transport.

`python -m loadgen.kv_bench` starts a NATS server and one KV store per transport, and this process is the worker.
Figures are medians; the operations of a round follow each other, so that they meet the same noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop
from rich.console import Console
from rich.table import Table

from shared.blocks import KVClient, block_keys, checksum
from shared.protocol.blocks import BlockRef, Place
from shared.protocol.kv import BlockMeta, Get, Sending, decode_reply, encode_kv
from shared.transport import Connection, Preference, Transport, TransportUnavailable, pick_transport

Array = npt.NDArray[np.uint8]

BLOCK_BYTES: Final = 2 * 30 * 32 * 3 * 64 * 4
"""The default model's block: K and V, 30 layers, 32 tokens, 3 heads of 64, in fp32."""
COUNTS: Final = (1, 8, 64)
START_TIMEOUT_S: Final = 30.0


class Row(msgspec.Struct, frozen=True):
    """One line of the table, in GB/s (10^9 bytes). `wire` (raw in the table) is a get without checksums."""

    transport: str
    blocks: int
    mbytes: float
    memcpy_gb_s: float
    put_gb_s: float
    get_gb_s: float
    wire_gb_s: float


async def measure(place: Place, transport: Transport, secret: str, blocks: int, rounds: int, block_bytes: int) -> Row:
    """Raises RuntimeError when a block does not arrive."""
    client = KVClient(lambda: [place], transport, secret, None, stage="bench")
    connection = await transport.connect(place.host, place.port, secret.encode(), START_TIMEOUT_S)
    source = np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    sums = [checksum(block) for block in source]
    seconds: dict[str, list[float]] = {"memcpy": [], "put": [], "get": [], "wire": []}
    for round_ in range(rounds + 1):
        salt = f"{blocks}/{round_}/{secrets.token_hex(4)}"
        keys = block_keys("bench", salt, range(blocks), 1)
        began = [time.perf_counter()]
        for into, block in zip(target, source, strict=True):
            np.copyto(into, block)
        began.append(time.perf_counter())
        refs = await client.put("", 0.0, list(zip(keys, source, sums, strict=True)))
        began.append(time.perf_counter())
        hits = await client.get(refs, list(target), timeout_s=START_TIMEOUT_S)
        began.append(time.perf_counter())
        await _get_unverified(connection, refs, target)
        began.append(time.perf_counter())
        if not all(hits) or not np.array_equal(source, target):
            raise RuntimeError(f"{hits.count(False)} of {blocks} blocks did not come back")
        if round_ > 0:  # the first round makes connections
            for name, start, end in zip(seconds, began, began[1:], strict=False):
                seconds[name].append(end - start)
    connection.close()
    client.close()
    size = blocks * block_bytes / 1e9
    rate = {name: size / statistics.median(times) for name, times in seconds.items()}
    return Row(transport.describe(), blocks, size * 1e3, rate["memcpy"], rate["put"], rate["get"], rate["wire"])


async def _fill(place: Place, transport: Transport, secret: str, block_bytes: int) -> None:
    """Use every slot of the store once, so that the kernel's work on first use is not measured."""
    client = KVClient(lambda: [place], transport, secret, None, stage="bench")
    block = np.zeros(block_bytes, np.uint8)
    check, batch = checksum(block), 0
    while True:
        keys = block_keys("bench", f"fill/{batch}", range(32), 1)
        await client.put("", 0.0, [(key, block, check) for key in keys])
        stats = await client.stats(place)
        if stats is None:
            raise RuntimeError("the store does not answer")
        if stats.evictions:
            break
        batch += 1
    client.close()


async def _get_unverified(connection: Connection, refs: list[BlockRef], target: Array) -> None:
    blocks = [BlockMeta(ref.key, ref.n_tokens, ref.n_bytes, ref.checksum) for ref in refs]
    await connection.send_header(encode_kv(Get(blocks)))
    if decode_reply(await connection.receive_header()) != Sending([True] * len(refs)):
        raise RuntimeError("the store does not have all blocks any more")
    await connection.receive_buffers(list(target))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """A process of ours that listens on `port`, for as long as the block runs."""
    process = subprocess.Popen(  # noqa: S603 - our own programs
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
                break
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{command[-1]} did not start")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


async def bench(
    preference: Preference, counts: list[int], rounds: int, block_bytes: int, memory_gib: float
) -> list[Row]:
    """Raises TransportUnavailable where UCX does not load."""
    transport = pick_transport(preference)
    secret, nats_port, port = secrets.token_hex(16), _free_port(), _free_port()
    nats = [str(Path(sys.executable).parent / "nats-server"), "-a", "127.0.0.1", "-p", str(nats_port), "-js", "-sd"]
    environment = {
        "HEADRACE_NATS_URL": f"nats://127.0.0.1:{nats_port}",
        "HEADRACE_SECRET": secret,
        "HEADRACE_TRANSPORT": preference,
        "HEADRACE_STORE_PORT": str(port),
        "HEADRACE_STORE_MEMORY_GIB": str(memory_gib),
        "HEADRACE_STORE_PREFAULT": "false",
    }
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            _running([*nats, directory], nats_port, {}),
            _running([sys.executable, "-m", "services.kvstore"], port, environment),
        ):
            place = Place("bench", "127.0.0.1", port, transport.kind)
            await _fill(place, transport, secret, block_bytes)
            return [await measure(place, transport, secret, n, rounds, block_bytes) for n in counts]
    finally:
        await transport.close()


def show(rows: list[Row], block_bytes: int) -> None:
    table = Table(title=f"KV plane, blocks of {block_bytes / 1e6:.2f} MB, GB/s (median)")
    for title in ("transport", "blocks", "MB", "memcpy", "put", "get", "get raw", "get/memcpy"):
        table.add_column(title, justify="left" if title == "transport" else "right", no_wrap=title == "transport")
    for row in rows:
        figures = (row.memcpy_gb_s, row.put_gb_s, row.get_gb_s, row.wire_gb_s)
        share = f"{row.get_gb_s / row.memcpy_gb_s:.0%}"
        table.add_row(row.transport, str(row.blocks), f"{row.mbytes:.1f}", *(f"{f:.2f}" for f in figures), share)
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadgen.kv_bench", description="Measure the KV plane.")
    parser.add_argument("--transport", choices=["ucx", "tcp"], action="append", help="default: both")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(COUNTS), help="blocks in one exchange")
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory-gib", type=float, default=0.5, help="the store's memory")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for preference in options.transport or ["ucx", "tcp"]:
        try:
            measured: Any = uvloop.run(
                bench(preference, options.blocks, options.rounds, options.block_bytes, options.memory_gib)
            )
        except (TransportUnavailable, RuntimeError) as error:
            Console(stderr=True).print(f"{preference}: {error}", highlight=False)
            continue
        rows += measured
    show(rows, options.block_bytes)
    if options.json:
        options.json.write_text(json.dumps(msgspec.to_builtins(rows), indent=1))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
