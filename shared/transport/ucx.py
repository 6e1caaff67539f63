"""Block bytes over UCX: shared memory and cma on one host, TCP or RDMA between hosts, straight from and to a GPU.

Peers exchange the addresses of their UCX workers in the authenticated handshake, so UCX needs no listener of its own.
ucxx runs in thread mode with Python futures: a pending receive costs almost nothing and the event loop stays free.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import structlog

from shared.protocol.kv import Carrier
from shared.transport.base import PROBE_TIMEOUT_S, Arrived, Connection, Transport
from shared.transport.buffers import Buffer, check_buffer
from shared.transport.errors import CarrierUnusable, PeerGone, TransportUnavailable
from shared.transport.handshake import Agreement, Side
from shared.transport.stream import Stream
from shared.transport.tcp import TcpConnection, TcpTransport
from shared.transport.ucx_environment import ucx_environment
from shared.transport.ucx_log import UcxLog, process_log
from shared.transport.ucx_pairing import EndpointPairing

WINDOW: Final = 32
"""Requests in flight on one connection; enough to hide the cost of each, few enough for ucxx's pool of futures."""
CLOSE_PERIOD_NS: Final = 1_000_000_000
STUCK_AFTER_S: Final = 5.0
PROBE: Final = b"headrace" * 2048
TCP_ONLY_S: Final = 60.0
"""How long a peer that UCX could not reach is served over TCP before UCX is tried again."""
MAX_TCP_ONLY: Final = 256
FAST_LANES: Final = frozenset({"cma", "cuda_ipc", "rc_mlx5", "dc_mlx5", "rc_verbs", "ud_mlx5", "ud_verbs", "self"})

log = structlog.get_logger(__name__)


class UcxConnection(Connection):
    """Headers on the socket, block bytes over one UCX endpoint.

    UCX goes on writing into a buffer whose receive was merely forgotten. So a failed, cancelled or late operation first
    closes the endpoint, which makes UCX give up its requests, and then waits until each has been given up.
    """

    carrier: Carrier = "ucx"

    def __init__(self, stream: Stream, endpoint: Any, agreement: Agreement, ucxx: Any) -> None:
        super().__init__(stream)
        self._endpoint = endpoint
        self._error: type[Exception] = ucxx.exceptions.UCXError
        self._send_mark = ucxx.types.Tag(agreement.theirs.mark)
        self._receive_mark = ucxx.types.Tag(agreement.mine.mark)

    async def _send(self, buffers: Sequence[Buffer]) -> None:
        checked = [check_buffer(buffer, writable=False) for buffer in buffers]

        async def start(buffer: Buffer) -> None:
            await self._endpoint.send(buffer, tag=self._send_mark, force_tag=True)

        await self._move(start, checked, lambda _: None)

    async def _receive(self, buffers: Sequence[Buffer], arrived: Arrived) -> None:
        checked = [check_buffer(buffer, writable=True) for buffer in buffers]

        async def start(buffer: Buffer) -> None:
            await self._endpoint.recv(buffer, tag=self._receive_mark, force_tag=True)

        await self._move(start, checked, arrived)

    async def _move(
        self, start: Callable[[Buffer], Coroutine[Any, Any, Any]], buffers: Sequence[Buffer], arrived: Arrived
    ) -> None:
        pending: dict[asyncio.Task[Any], int] = {}
        try:
            with self._watch_peer():
                for number, buffer in enumerate(buffers):
                    if len(pending) == WINDOW:
                        await self._take_done(pending, arrived)
                    pending[asyncio.create_task(start(buffer))] = number
                while pending:
                    await self._take_done(pending, arrived)
        except BaseException:
            self.close()
            await _settle(set(pending), self.peer)
            raise

    async def _take_done(self, pending: dict[asyncio.Task[Any], int], arrived: Arrived) -> None:
        """Wait for at least one and remove those that are done. Raises PeerGone, with the rest still pending."""
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        numbers = [pending.pop(task) for task in done]
        if any(task.cancelled() for task in done):
            raise PeerGone(f"a transfer with {self.peer} was cancelled from outside")
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors and isinstance(errors[0], self._error):
            raise PeerGone(f"{self.peer} is gone: {errors[0]}") from errors[0]
        if errors:
            raise errors[0]  # PeerGone of a request that came to its turn after the close, or a fault of ours
        if self.closed:
            # A send that is given up because the endpoint closes ends without an error.
            raise PeerGone(f"the connection to {self.peer} was closed")
        for number in numbers:
            arrived(number)

    @contextlib.contextmanager
    def _watch_peer(self) -> Iterator[None]:
        """While UCX moves bytes, the end of the socket means that the peer is dead: sooner than UCX's keepalive."""

        def on_readable() -> None:
            if self._stream.peer_has_closed():
                self.close()
            else:
                self._stream.unwatch()

        self._stream.watch(on_readable)
        try:
            yield
        finally:
            self._stream.unwatch()

    def close(self) -> None:
        self._stream.close()
        endpoint, self._endpoint = self._endpoint, _CLOSED
        if endpoint is not _CLOSED:
            _abort(endpoint)


def _abort(endpoint: Any) -> None:
    endpoint.abort(period=CLOSE_PERIOD_NS)


class _Closed:
    """Stands in for an endpoint that was closed before a request could start."""

    async def send(self, *_: Any, **__: Any) -> None:
        raise PeerGone("the connection is closed")

    recv = send


_CLOSED: Final = _Closed()


async def _settle(tasks: set[asyncio.Task[Any]], peer: str) -> None:
    """Wait until UCX has given up every request, however often the caller is cancelled meanwhile.

    Without a bound: a buffer that UCX may still write into must never be used again.
    """
    started = time.monotonic()
    cancelled = False
    while tasks:
        try:
            done, tasks = await asyncio.wait(tasks, timeout=STUCK_AFTER_S)
        except asyncio.CancelledError:
            cancelled = True
            continue
        for task in done:
            if not task.cancelled():
                task.exception()  # seen, so that asyncio does not complain of it
        if tasks:
            log.error("ucx_requests_stuck", peer=peer, requests=len(tasks), after_s=time.monotonic() - started)
    if cancelled:
        raise asyncio.CancelledError


class UcxTransport(Transport):
    """UCX in this process. There can be one at a time; `open` it on the event loop that will use it."""

    kind: Carrier = "ucx"

    def __init__(self, ucxx: Any, ucx_log: UcxLog) -> None:
        self._ucxx = ucxx
        self._log = ucx_log
        self._tcp = TcpTransport()
        self._address = bytes(memoryview(ucxx.get_worker_address()))
        self._pairing = EndpointPairing(self._make_endpoint, _abort)
        self._tcp_only: dict[str, float] = {}
        self._warned_slow: set[tuple[str, ...]] = set()

    @classmethod
    def open(cls, host: str) -> UcxTransport:
        """Load UCX for a process that binds `host`. Raises TransportUnavailable when it does not load."""
        ucx_log = process_log()
        try:
            with ucx_environment(host, ucx_log.descriptor):
                import ucxx  # noqa: PLC0415 - reads the environment when imported

                ucxx.init(progress_mode="thread", enable_delayed_submission=True, enable_python_future=True)
        except Exception as error:  # ucxx fails in many ways: ImportError, OSError, RuntimeError, its own errors
            raise TransportUnavailable(f"UCX cannot be used: {type(error).__name__}: {error}") from error
        return cls(ucxx, ucx_log)

    def sides(self) -> dict[Carrier, Side]:
        return {"ucx": Side(self._address, secrets.randbits(64)), "tcp": Side()}

    async def connect(self, host: str, port: int, secret: bytes, timeout_s: float) -> Connection:
        peer = f"{host}:{port}"
        if self._tcp_only.get(peer, 0.0) < time.monotonic():
            self._tcp_only.pop(peer, None)
            try:
                return await super().connect(host, port, secret, timeout_s)
            except CarrierUnusable as error:
                reason = str(error)
        else:
            return await self._tcp.connect(host, port, secret, timeout_s)
        connection = await self._tcp.connect(host, port, secret, timeout_s)
        if len(self._tcp_only) >= MAX_TCP_ONLY:
            self._tcp_only.clear()
        self._tcp_only[peer] = time.monotonic() + TCP_ONLY_S
        log.warning("ucx_unreachable_using_tcp", peer=peer, reason=reason, for_s=TCP_ONLY_S)
        return connection

    async def establish(self, stream: Stream, agreement: Agreement, *, accepted: bool) -> Connection:
        if agreement.carrier == "tcp":
            return TcpConnection(stream)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                endpoint = await self._pairing.make(stream, agreement, accepted=accepted)
        except (self._ucxx.exceptions.UCXError, TimeoutError, PeerGone) as error:
            raise CarrierUnusable(f"UCX knows no way to {stream.peer}: {error}") from error
        connection = UcxConnection(stream, endpoint, agreement, self._ucxx)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await _probe(connection, accepted=accepted)
        except (TimeoutError, PeerGone) as error:
            raise CarrierUnusable(f"UCX brought no bytes from {stream.peer}: {error}") from error
        self._warn_if_slow()
        return connection

    async def _make_endpoint(self, address: bytes) -> Any:
        return await self._ucxx.create_endpoint_from_worker_address(self._ucxx.get_ucx_address_from_buffer(address))

    def describe(self) -> str:
        self._log.refresh()
        if not self._log.lanes:
            return "ucx"
        return f"ucx ({', '.join(self._log.lanes[-1])})"

    def _warn_if_slow(self) -> None:
        self._log.refresh()
        for lanes in self._log.lanes:
            if not FAST_LANES.intersection(lanes) and lanes not in self._warned_slow:
                self._warned_slow.add(lanes)
                log.warning(
                    "ucx_is_slow",
                    lanes=list(lanes),
                    hint="on one host, cma needs ptrace permission and a shared PID and IPC namespace",
                )

    async def close(self) -> None:
        """Stops ucxx's threads, without which the process would not end; takes up to a second."""
        try:
            self._ucxx.reset()
        except self._ucxx.exceptions.UCXError as error:
            log.warning("ucx_close_incomplete", error=str(error).splitlines()[0])


async def _probe(connection: UcxConnection, *, accepted: bool) -> None:
    """Send some bytes there and back, enough to take the way that blocks will take. Raises PeerGone."""
    there, back = bytearray(PROBE), bytearray(len(PROBE))
    if accepted:
        await connection.receive_buffers([back])
        await connection.send_buffers([back])
    else:
        await connection.send_buffers([there])
        await connection.receive_buffers([back])
    if back != PROBE:
        raise PeerGone(f"UCX changed the bytes on the way to {connection.peer}")
