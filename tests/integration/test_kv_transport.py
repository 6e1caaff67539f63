"""Both transports between two processes: the bytes arrive, and every way to fail is an error in time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import pytest_asyncio
import structlog

from shared.protocol.kv import MAX_HEADER_BYTES, NONCE_BYTES, Challenge, Welcome, encode_kv
from shared.transport import (
    Connection,
    ConnectionPool,
    PeerGone,
    PeerRefused,
    PeerUnreachable,
    ProtocolViolation,
    Transport,
    UnusableBuffer,
    pick_transport,
)
from shared.transport.handshake import Agreement
from shared.transport.listener import HANDSHAKE_TIMEOUT_S, MAX_STRANGERS
from shared.transport.stream import Stream
from tests.conftest import free_port, wait_for_port
from tests.integration.kv_peer import pattern

SECRET = b"correct horse"
TIMEOUT_S = 10.0


class Peer:
    def __init__(self, kind: str, *, port: int = 0, max_connections: int = 64, **environment: str) -> None:
        self.port = port or free_port()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.kv_peer",
                kind,
                str(self.port),
                SECRET.decode(),
                str(max_connections),
            ],
            env={**os.environ, **environment},
        )
        wait_for_port(self.port, self._process)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait(timeout=20)


@pytest.fixture(scope="module", params=["tcp", "ucx"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def transport(kind: str) -> AsyncIterator[Transport]:
    made = pick_transport("ucx" if kind == "ucx" else "tcp")
    yield made
    await made.close()


@pytest.fixture(scope="module")
def lasting_peer(kind: str) -> Iterator[Peer]:
    """One that no test kills."""
    made = Peer(kind)
    yield made
    assert made.stop() == 0


@pytest.fixture
def peer(kind: str) -> Iterator[Peer]:
    made = Peer(kind)
    yield made
    made.kill()


async def connect(transport: Transport, peer: Peer) -> Connection:
    return await transport.connect("127.0.0.1", peer.port, SECRET, TIMEOUT_S)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 100), (5, 8192), (33, 70_001), (256, 9000), (8, 1_474_560)])
async def test_buffers_arrive_bit_for_bit_and_in_order(
    transport: Transport, lasting_peer: Peer, kind: str, count: int, size: int
) -> None:
    connection = await connect(transport, lasting_peer)
    sent = [pattern(1000 + i, size) for i in range(count)]
    back = [np.zeros(size, np.uint8) for _ in range(count)]
    async with asyncio.timeout(TIMEOUT_S):
        await connection.send_header(f"echo {count} {size}".encode())
        await connection.send_buffers(sent)
        await connection.receive_buffers(back)
    assert all(np.array_equal(a, b) for a, b in zip(sent, back, strict=True))
    assert connection.carrier == kind
    connection.close()


async def test_many_connections_at_once_do_not_mix_their_bytes(transport: Transport, lasting_peer: Peer) -> None:
    async def exchange(number: int) -> None:
        connection = await connect(transport, lasting_peer)
        for round_ in range(3):
            sent = [pattern(100 * number + 10 * round_ + i, 50_000) for i in range(4)]
            back = [np.zeros(50_000, np.uint8) for _ in sent]
            await connection.send_header(b"echo 4 50000")
            await connection.send_buffers(sent)
            await connection.receive_buffers(back)
            assert all(np.array_equal(a, b) for a, b in zip(sent, back, strict=True))
        connection.close()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(exchange(number))


async def test_connections_that_close_do_not_disturb_their_neighbours(
    transport: Transport, lasting_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX ties endpoints of two workers to each other; the ends that it ties must be those of one connection.

    So the client comes to its endpoints in another order than the store, as happens on a busy machine.
    """
    n_bytes, at_once, rounds = 50_000, 8, 25
    sent = [pattern(i, n_bytes) for i in range(4)]
    dice = random.Random(1)
    establish = transport.establish

    async def establish_later(stream: Stream, agreement: Agreement, *, accepted: bool) -> Connection:
        await asyncio.sleep(dice.random() * 0.03)
        return await establish(stream, agreement, accepted=accepted)

    async def echo(connection: Connection) -> None:
        back = [np.zeros(n_bytes, np.uint8) for _ in sent]
        await connection.send_header(f"echo {len(sent)} {n_bytes}".encode())
        await connection.send_buffers(sent)
        await connection.receive_buffers(back)
        assert all(np.array_equal(a, b) for a, b in zip(sent, back, strict=True))

    async def exchange(number: int) -> None:
        connection = await connect(transport, lasting_peer)
        for _ in range(number % 4):
            await echo(connection)
        connection.close()

    monkeypatch.setattr(transport, "establish", establish_later)
    async with asyncio.timeout(60):
        for _ in range(rounds):
            async with asyncio.TaskGroup() as tasks:
                for number in range(at_once):
                    tasks.create_task(exchange(number))


async def test_a_client_with_another_secret_is_refused(transport: Transport, lasting_peer: Peer) -> None:
    with pytest.raises(PeerRefused, match="secret"):
        await transport.connect("127.0.0.1", lasting_peer.port, b"wrong", TIMEOUT_S)


async def test_a_store_that_cannot_prove_the_secret_is_refused(transport: Transport) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for message in (Challenge(bytes(NONCE_BYTES), ["tcp"]), Welcome(b"", 0, bytes(32))):
            data = encode_kv(message)
            writer.write(len(data).to_bytes(4, "little") + data)
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerRefused, match="prove"):
            await transport.connect("127.0.0.1", port, SECRET, TIMEOUT_S)


async def test_a_peer_that_says_nothing_is_cut_off(lasting_peer: Peer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lasting_peer.port)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S + TIMEOUT_S):
        await reader.read()
    writer.close()


async def test_silent_strangers_keep_nobody_out_and_are_bounded(transport: Transport, lasting_peer: Peer) -> None:
    async def end_of(stranger: asyncio.StreamReader) -> None:
        await stranger.read()

    strangers = [await asyncio.open_connection("127.0.0.1", lasting_peer.port) for _ in range(3 * MAX_STRANGERS)]
    ends = [asyncio.create_task(end_of(reader)) for reader, _ in strangers]
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S * 0.9):  # before the strangers' own time is over
        for _ in range(5):
            connection = await connect(transport, lasting_peer)
            connection.close()
        await asyncio.gather(*ends[: 2 * MAX_STRANGERS])
    for end in ends:
        end.cancel()
    for _, writer in strangers:
        writer.close()


async def test_a_stranger_that_announces_a_huge_message_is_cut_off_at_once(lasting_peer: Peer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lasting_peer.port)
    writer.write((2**32 - 1).to_bytes(4, "little"))
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S * 0.9):
        await reader.read()
    writer.close()


async def test_something_that_does_not_speak_the_protocol_is_an_error(transport: Transport) -> None:
    async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(web_server, "127.0.0.1", 0) as server:
        with pytest.raises(ProtocolViolation):
            await transport.connect("127.0.0.1", server.sockets[0].getsockname()[1], SECRET, TIMEOUT_S)


async def test_nobody_listening_is_an_error(transport: Transport) -> None:
    with pytest.raises(PeerUnreachable):
        await transport.connect("127.0.0.1", free_port(), SECRET, TIMEOUT_S)


async def test_a_listener_that_never_greets_is_an_error_in_time(transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerUnreachable, match="greet"):
        await transport.connect("127.0.0.1", silent.getsockname()[1], SECRET, 0.5)


async def test_a_header_beyond_the_limit_is_not_sent(transport: Transport, lasting_peer: Peer) -> None:
    connection = await connect(transport, lasting_peer)
    with pytest.raises(ProtocolViolation):
        await connection.send_header(bytes(MAX_HEADER_BYTES + 1))
    assert connection.closed


async def test_a_peer_killed_in_the_middle_is_an_error_within_seconds(transport: Transport, peer: Peer) -> None:
    connection = await connect(transport, peer)
    into = [np.zeros(1_000_000, np.uint8) for _ in range(40)]
    await connection.send_header(b"die 40 1000000")
    async with asyncio.timeout(5):
        with pytest.raises(PeerGone):
            await connection.receive_buffers(into)
    assert connection.closed


async def test_a_peer_killed_while_it_receives_is_an_error_within_seconds(transport: Transport, peer: Peer) -> None:
    connection = await connect(transport, peer)
    await connection.send_header(b"half 1 1000")  # it will not receive what follows
    sending = asyncio.create_task(connection.send_buffers([np.zeros(20_000_000, np.uint8)] * 40))
    await asyncio.sleep(0.3)
    peer.kill()
    async with asyncio.timeout(5):
        with pytest.raises(PeerGone):
            await sending


async def test_after_a_time_out_nobody_writes_into_the_buffers_any_more(transport: Transport, peer: Peer) -> None:
    connection = await connect(transport, peer)
    into = [np.zeros(1_000_000, np.uint8) for _ in range(40)]
    peer.signal(signal.SIGSTOP)
    await connection.send_header(b"send 40 1000000")
    tasks_before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(connection.receive_buffers(into), 0.5)
    assert connection.closed
    assert asyncio.all_tasks() == tasks_before  # UCX has given up every request, not only been told to
    for buffer in into:
        buffer[:] = 0xEE
    peer.signal(signal.SIGCONT)
    await asyncio.sleep(1.0)
    assert all((buffer == 0xEE).all() for buffer in into)


async def test_after_a_cancelled_receive_nobody_writes_into_the_buffers_any_more(
    transport: Transport, peer: Peer
) -> None:
    connection = await connect(transport, peer)
    into = [np.zeros(500_000, np.uint8) for _ in range(3)]
    await connection.send_header(b"half 3 500000")
    tasks_before = asyncio.all_tasks()
    receiving = asyncio.create_task(connection.receive_buffers(into))
    async with asyncio.timeout(TIMEOUT_S):
        while not np.array_equal(into[0], pattern(0, 500_000)):
            await asyncio.sleep(0.01)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert connection.closed
    assert asyncio.all_tasks() == tasks_before
    into[1][:] = 0xEE
    await asyncio.sleep(0.5)
    assert (into[1] == 0xEE).all()


async def test_a_cancelled_transfer_can_be_cancelled_again_and_still_ends_settled(
    transport: Transport, peer: Peer
) -> None:
    connection = await connect(transport, peer)
    await connection.send_header(b"half 3 500000")
    into = [np.zeros(500_000, np.uint8) for _ in range(3)]
    tasks_before = asyncio.all_tasks()
    receiving = asyncio.create_task(connection.receive_buffers(into))
    await asyncio.sleep(0.3)
    for _ in range(3):
        receiving.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert asyncio.all_tasks() == tasks_before


async def test_buffers_with_gaps_or_without_write_permission_are_refused(
    transport: Transport, lasting_peer: Peer
) -> None:
    connection = await connect(transport, lasting_peer)
    with pytest.raises(UnusableBuffer):
        await connection.send_buffers([np.zeros((10, 10), np.uint8)[:, ::2]])
    connection = await connect(transport, lasting_peer)
    with pytest.raises(UnusableBuffer):
        await connection.receive_buffers([bytes(10)])


async def test_connections_beyond_the_limit_are_refused(transport: Transport, kind: str) -> None:
    small = Peer(kind, max_connections=2)
    try:
        held = [await connect(transport, small) for _ in range(2)]
        with pytest.raises(PeerRefused, match="too many"):
            await connect(transport, small)
        held[0].close()
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    held[0] = await connect(transport, small)
                    break
                except PeerRefused:
                    await asyncio.sleep(0.05)
        for connection in held:
            connection.close()
    finally:
        small.kill()


async def test_of_many_that_come_at_once_no_more_than_the_limit_get_in(transport: Transport, kind: str) -> None:
    small = Peer(kind, max_connections=2)
    try:
        came = await asyncio.gather(*[connect(transport, small) for _ in range(12)], return_exceptions=True)
        admitted = [connection for connection in came if isinstance(connection, Connection)]
        refused = [error for error in came if isinstance(error, PeerRefused) and "too many" in str(error)]
        assert (len(admitted), len(refused)) == (2, 10), came
        for connection in admitted:
            await connection.send_header(b"echo 1 100")
            connection.close()
    finally:
        small.kill()


async def test_the_pool_reuses_connections_up_to_its_bound(transport: Transport, lasting_peer: Peer) -> None:
    pool = ConnectionPool(transport, SECRET, per_peer=2)
    used: set[int] = set()
    at_once = most = 0
    # Without it the first connection may do all exchanges while the second is still being made.
    full = asyncio.Event()

    async def exchange() -> None:
        nonlocal at_once, most
        async with pool.borrow("127.0.0.1", lasting_peer.port) as connection:
            at_once += 1
            most = max(most, at_once)
            used.add(id(connection))
            if at_once == 2:
                full.set()
            await full.wait()
            await connection.send_header(b"send 1 1000")
            await connection.receive_buffers([np.zeros(1000, np.uint8)])
            at_once -= 1

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(exchange())
    assert most == 2
    assert len(used) == 2
    pool.close()


async def test_the_pool_does_not_hand_out_a_connection_whose_peer_is_gone(
    transport: Transport, kind: str, peer: Peer
) -> None:
    pool = ConnectionPool(transport, SECRET, retry_after_s=0.0)

    async def exchange() -> Connection:
        async with pool.borrow("127.0.0.1", peer.port) as connection:
            await connection.send_header(b"send 1 1000")
            await connection.receive_buffers([np.zeros(1000, np.uint8)])
            return connection

    first = await exchange()
    assert await exchange() is first
    peer.kill()
    again = Peer(kind, port=peer.port)
    try:
        assert await exchange() is not first
        assert first.closed
    finally:
        pool.close()
        again.kill()


async def test_the_pool_fails_at_once_while_a_peer_is_down(transport: Transport) -> None:
    pool = ConnectionPool(transport, SECRET, retry_after_s=60.0)
    port = free_port()
    for _ in range(2):
        with pytest.raises(PeerUnreachable):
            async with pool.borrow("127.0.0.1", port):
                pass
    assert pool.is_down("127.0.0.1", port)
    pool.close()


async def test_peers_of_different_transports_agree_on_tcp(transport: Transport, kind: str) -> None:
    other = Peer("tcp" if kind == "ucx" else "ucx")
    try:
        connection = await connect(transport, other)
        assert connection.carrier == "tcp"
        into = [np.zeros(300_000, np.uint8) for _ in range(4)]
        await connection.send_header(b"send 4 300000")
        await connection.receive_buffers(into)
        assert all(np.array_equal(into[i], pattern(i, 300_000)) for i in range(4))
        connection.close()
    finally:
        other.kill()


async def test_where_ucx_finds_no_way_tcp_takes_over_with_a_warning(transport: Transport, kind: str) -> None:
    if kind == "tcp":
        pytest.skip("concerns UCX only")
    lonely = Peer("ucx", UCX_TLS="self")
    try:
        with structlog.testing.capture_logs() as logs:
            connection = await connect(transport, lonely)
            again = await connect(transport, lonely)
        assert (connection.carrier, again.carrier) == ("tcp", "tcp")
        assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["ucx_unreachable_using_tcp"]
        into = [np.zeros(300_000, np.uint8)]
        await again.send_header(b"send 1 300000")
        await again.receive_buffers(into)
        assert np.array_equal(into[0], pattern(0, 300_000))
        connection.close()
        again.close()
    finally:
        lonely.kill()


LOADING = """
import asyncio, sys
sys.modules["ucxx"] = None
from shared.transport import pick_transport
async def main():
    print(pick_transport(sys.argv[1]).describe())
asyncio.run(main())
"""


def test_a_process_without_ucx_falls_back_with_a_warning_or_fails_when_ucx_was_asked_for() -> None:
    def load(preference: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LOADING, preference]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    fallen_back = load("auto")
    assert fallen_back.stdout.splitlines()[-1] == "tcp"
    assert "transport_fell_back" in fallen_back.stdout + fallen_back.stderr
    assert "TransportUnavailable" in load("ucx").stderr


CONNECTING = """
import asyncio
from shared.transport import Listener, pick_transport
async def main():
    transport = pick_transport("ucx")
    try:
        async with Listener(transport, lambda connection: asyncio.sleep(60), b"s", host="127.0.0.1") as listener:
            connection = await transport.connect("127.0.0.1", listener.port, b"s", 10)
            print(transport.describe())
            connection.close()
    finally:
        await transport.close()
asyncio.run(main())
"""


def test_ucx_without_shared_memory_and_cma_is_called_slow() -> None:
    def connecting(**environment: str) -> str:
        command = [sys.executable, "-c", CONNECTING]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **environment}
        )
        return run.stdout + run.stderr

    slow, usual = connecting(UCX_TLS="tcp"), connecting()
    assert "ucx_is_slow" in slow
    assert "ucx (tcp)" in slow
    assert ("ucx_is_slow" in usual) == ("cma" not in usual)


async def test_the_transport_says_what_carries_the_bytes(transport: Transport, lasting_peer: Peer, kind: str) -> None:
    connection = await connect(transport, lasting_peer)
    if kind == "tcp":
        assert transport.describe() == "tcp"
    else:
        assert transport.describe().startswith("ucx (")
    connection.close()
