"""The connection of one service to NATS, and everything that Headrace does over it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError, NotFoundError

from shared.bus.board import Announcer, StatusBoard
from shared.bus.errors import (
    AppendRefused,
    BusError,
    ConnectionLost,
    DuplicateWork,
    LogExists,
    MessageTooLarge,
    PublishFailed,
    QueueFull,
    RequestUnknown,
    ServerMissing,
    ServerUnusable,
)
from shared.bus.follow import LogReader
from shared.bus.log import REQUEST_TIMEOUT_S, RequestLog
from shared.bus.queues import QueueReadings, read_queue, unfinished_of
from shared.bus.streams import ensure_streams, limit_requests
from shared.bus.work import WorkQueue
from shared.protocol.jobs import DecodeJob, GenerationRequest, encode_work
from shared.protocol.records import Accepted, Ended
from shared.protocol.status import InstanceStatus
from shared.protocol.streams import JOBS, REQUESTS, StreamSpec
from shared.protocol.subjects import (
    CANCEL,
    PRIORITIES,
    Priority,
    Stage,
    dead_subject,
    job_filter,
    job_subject,
    request_filter,
    request_subject,
)

MIN_SERVER = (2, 11)
RECONNECT_WAIT_S = 0.1
MAX_CRASHED_NAMED = 16
PENDING_BYTES = 8 << 20

# JetStream error codes (errors.json of the server): a limit of the stream or of the subject is reached.
_STREAM_FULL = {10077, 10047, 10122, 10023, 10028}
_WRONG_LAST_SEQUENCE = {10071, 10164}

log = structlog.get_logger(__name__)


def new_worker_id(instance: str) -> str:
    """Names one run of an instance: a restarted `decode-0` is another worker."""
    return f"{instance}.{secrets.token_hex(3)}"


@dataclass
class _Link:
    """What the client's callbacks and the bus both know of the connection."""

    statuses: StatusBoard = field(default_factory=StatusBoard)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The connection is gone for good, or this instance cannot announce itself any more: `failure` says so."""
    failure: BaseException | None = None
    closing: bool = False


class Bus:
    """One NATS connection. Reconnects without limit; every request on it has a time-out.

    Use `async with await Bus.connect(...) as bus`. The status board fills itself; `announce` and `on_cancel` are
    opted in.
    """

    def __init__(self, client: Client, link: _Link) -> None:
        self.client = client
        self.js = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self.statuses = link.statuses
        self._link = link
        self._announcer: Announcer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, url: str, *, name: str, wait_s: float = 30.0) -> Self:
        """Connect, check the server, set up the streams.

        Raises ServerMissing when none answers within `wait_s`, ServerUnusable when it cannot serve us. Both say what
        to do.
        """
        link = _Link()
        client = await _connect(url, name, wait_s, link)
        try:
            _check_version(client)
            bus = cls(client, link)
            await bus._set_up_streams(wait_s)
            await client.subscribe("hr.status.>", cb=link.statuses.on_status)
            link.statuses.heard_nothing_yet()
        except BaseException:
            await client.close()
            raise
        return bus

    async def _set_up_streams(self, wait_s: float) -> None:
        give_up = time.monotonic() + wait_s
        while True:
            try:
                await ensure_streams(self.js)
                return
            except (nats.errors.Error, APIError) as error:
                if time.monotonic() >= give_up:
                    raise ServerUnusable(f"JetStream does not answer: {error}. Start nats-server with -js") from error
                await asyncio.sleep(0.25)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop announcing, flush what is pending, disconnect. Bounded by a few seconds."""
        self._link.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                if self.client.is_connected:
                    await self.client.flush()
                await self.client.close()
        except (
            nats.errors.Error,
            TimeoutError,
            OSError,
            RuntimeError,
        ) as error:  # a dead uvloop transport raises the last
            log.warning("close_unclean", error=str(error))

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    @property
    def max_payload(self) -> int:
        """Largest message in bytes that the server takes."""
        return self.client.max_payload

    # Statuses and hints

    def announce(self, report: Callable[[], InstanceStatus]) -> None:
        """Publish `report()` every second and when asked, until the bus closes."""
        self._announcer = Announcer(self.client, report)
        task = asyncio.create_task(self._announcer.run(), name="announcer")
        self._tasks.add(task)
        task.add_done_callback(self._on_announcer_ended)

    def _on_announcer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("announcer_failed", error=repr(error), exc_info=error)
            self._link.failure = error
            self._link.closed.set()

    async def announce_now(self) -> None:
        """Let the others know at once what has changed; before `announce` it does nothing."""
        if self._announcer is not None:
            await self._announcer.publish()

    async def watch(self) -> None:
        """Returns never; raises ConnectionLost when the client gave up its connection for good, and BusError when this
        instance could not go on announcing itself: it would serve, and look dead to all others.

        nats-py reconnects without limit after a lost server but not after an error that the server sent it, such as
        permissions that were taken away. A service then ends, and its supervisor starts it again.
        """
        await self._link.closed.wait()
        if self._link.failure is not None:
            raise BusError(f"the status is announced no more: {self._link.failure!r}; restart the service")
        raise ConnectionLost("NATS closed this connection for good, see the log; restart the service")

    async def on_cancel(self, callback: Callable[[str], Awaitable[None]]) -> None:
        """Call back with the id of each request that somebody ended from outside. A hint: it may be lost."""

        async def deliver(message: Msg) -> None:
            await callback(message.data.decode(errors="replace"))

        await self.client.subscribe(CANCEL, cb=deliver)

    # Logs

    async def create_log(self, accepted: Accepted, headers: dict[str, str] | None = None) -> RequestLog:
        """Begin a request's log. Raises LogExists when the id was accepted before, PublishFailed without NATS."""
        new = RequestLog(self.client, accepted.tenant, accepted.request_id)
        try:
            await new.append(accepted, patience_s=REQUEST_TIMEOUT_S, headers=headers)
        except AppendRefused as error:
            raise LogExists(f"{accepted.request_id} exists already") from error
        return new

    def open_log(self, tenant: str, request_id: str, last_seq: int = 0) -> RequestLog:
        """For appending behind `last_seq`, or for reading."""
        return RequestLog(self.client, tenant, request_id, last_seq)

    def follow(self, tenant: str, request_id: str, after_seq: int = 0) -> LogReader:
        """`async with bus.follow(...) as reader: async for entry in reader`; ends after the terminal record."""
        return LogReader(self.client, tenant, request_id, after_seq)

    async def end_request(self, tenant: str, request_id: str, ended: Ended, *, unclaimed_only: bool = False) -> bool:
        """Append a terminal record from outside (cancel, deadline) and tell the holders.

        False when the log had ended already, or with `unclaimed_only` when a worker has claimed it. Raises
        RequestUnknown, or PublishFailed without NATS.
        """
        request_log = self.open_log(tenant, request_id)
        while True:
            state = await request_log.state()
            if state.ended is not None or (unclaimed_only and state.claims):
                return False
            try:
                await request_log.append(_complete(ended, state.epoch, len(state.output_ids)), patience_s=5.0)
                break
            except AppendRefused:
                continue  # the holder wrote a record in between
        await self.broadcast_cancel(request_id)
        return True

    async def broadcast_cancel(self, request_id: str) -> None:
        try:
            await self.client.publish(CANCEL, request_id.encode())
        except nats.errors.Error as error:
            log.warning("cancel_hint_not_sent", request_id=request_id, error=str(error))

    # Work

    async def publish_request(self, request: GenerationRequest, headers: dict[str, str] | None = None) -> None:
        """Queue accepted work for prefill. Raises QueueFull, DuplicateWork, MessageTooLarge or PublishFailed."""
        subject = request_subject(request.model, request.priority, request.tenant, request.request_id)
        await self._publish_work(REQUESTS[request.priority], subject, encode_work(request), headers)

    async def publish_job(self, job: DecodeJob, headers: dict[str, str] | None = None) -> None:
        """Queue prefilled work for decode. Raises QueueFull, DuplicateWork, MessageTooLarge or PublishFailed."""
        request = job.request
        subject = job_subject(request.model, request.priority, request.tenant, request.request_id)
        await self._publish_work(JOBS, subject, encode_work(job), headers)

    async def _publish_work(
        self, stream: StreamSpec, subject: str, data: bytes, headers: dict[str, str] | None
    ) -> None:
        try:
            reply = await self.client.request(
                subject,
                data,
                timeout=REQUEST_TIMEOUT_S,
                headers={
                    **(headers or {}),
                    "Nats-Expected-Last-Subject-Sequence": "0",
                    "Nats-Expected-Stream": stream.name,
                },
            )
            answer = msgspec.json.decode(reply.data)
        except nats.errors.MaxPayloadError as error:
            raise MessageTooLarge(f"{subject}: {len(data)} bytes, the NATS server takes {self.max_payload}") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise PublishFailed(f"{subject}: not confirmed by NATS: {error!r}") from error
        failure = answer.get("error")
        if failure is None:
            return
        if failure.get("err_code") in _WRONG_LAST_SEQUENCE:
            raise DuplicateWork(f"{subject} is queued already")
        if failure.get("err_code") in _STREAM_FULL:
            raise QueueFull(f"{stream.name} is full: {failure.get('description')}")
        raise PublishFailed(f"{subject}: {failure.get('description')}")

    async def bury(self, stage: Stage, request: GenerationRequest, cause: str, crashed: Sequence[str] = ()) -> None:
        """Keep work that was given up in the dead-letter stream, once, with its cause, its stage and the workers that
        it crashed (the last few) in the headers. Raises PublishFailed without NATS.
        """
        headers = {
            "Headrace-Cause": cause,
            "Headrace-Stage": stage,
            "Headrace-Claims": ",".join(crashed[-MAX_CRASHED_NAMED:]),
            "Nats-Expected-Last-Subject-Sequence": "0",
        }
        await self._bury(dead_subject(stage, request.tenant, request.request_id), encode_work(request), headers)

    async def bury_raw(self, subject: str, data: bytes, cause: str) -> None:
        """The same for a message that could not be read."""
        await self._bury(subject, data, {"Headrace-Cause": cause})

    async def _bury(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        try:
            await self.js.publish(subject, data, headers=headers)
        except nats.errors.MaxPayloadError as error:  # the headers made it too large, as they would again
            log.error("dead_letter_lost", subject=subject, error=str(error))
        except APIError as error:
            if error.err_code not in _WRONG_LAST_SEQUENCE:  # else it lies there already
                raise PublishFailed(f"{subject}: {error.description}") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise PublishFailed(f"{subject}: not confirmed by NATS: {error!r}") from error

    def request_queue(self, model: str) -> WorkQueue:
        """Where prefill workers of this model pull."""
        filters: dict[Priority, str] = {p: request_filter(model, p) for p in PRIORITIES}
        return WorkQueue(self.client, self.js, REQUESTS, WorkQueue.durable_name("prefill", model), filters)

    def job_queue(self, model: str) -> WorkQueue:
        """Where decode workers of this model pull."""
        filters: dict[Priority, str] = {p: job_filter(model, p) for p in PRIORITIES}
        streams = dict.fromkeys(PRIORITIES, JOBS)
        return WorkQueue(self.client, self.js, streams, WorkQueue.durable_name("decode", model), filters)

    async def queue_depth(self, stage: Stage, model: str, priority: Priority | None = None) -> int:
        """Messages of a model that wait to be pulled by `prefill` or `decode`. Raises PublishFailed without NATS."""
        waiting = 0
        for p in PRIORITIES if priority is None else (priority,):
            stream = REQUESTS[p] if stage == "prefill" else JOBS
            try:
                info = await self.js.consumer_info(stream.name, f"{WorkQueue.durable_name(stage, model)}-{p}")
                waiting += info.num_pending or 0
            except NotFoundError:
                waiting += await self._count(stream, (request_filter if stage == "prefill" else job_filter)(model, p))
            except (nats.errors.Error, APIError, TimeoutError) as error:
                raise PublishFailed(f"queue depth of {stage} unknown: {error}") from error
        return waiting

    async def limit_requests(self, limits: Mapping[Priority, int]) -> None:
        """Have the queue refuse more than so many requests of a priority, whoever publishes them.

        Raises ServerUnusable, or PublishFailed without NATS.
        """
        try:
            await limit_requests(self.js, limits)
        except (nats.errors.Error, APIError, TimeoutError) as error:
            raise PublishFailed(f"the limits of the request queue are not confirmed: {error}") from error

    async def read_queues(self, model: str) -> QueueReadings:
        """How the queues of requests and jobs stand. Raises PublishFailed without NATS."""
        prefill, decode = (WorkQueue.durable_name(stage, model) for stage in ("prefill", "decode"))
        reads = [
            *(read_queue(self.js, REQUESTS[p], {p: (f"{prefill}-{p}", request_filter(model, p))}) for p in PRIORITIES),
            read_queue(self.js, JOBS, {p: (f"{decode}-{p}", job_filter(model, p)) for p in PRIORITIES}),
        ]
        try:
            *requests, jobs = await asyncio.gather(*reads)
        except (nats.errors.Error, APIError, TimeoutError) as error:
            raise PublishFailed(f"the work queues do not answer: {error}") from error
        return QueueReadings(dict(zip(PRIORITIES, requests, strict=True)), jobs)

    async def unfinished_of(self, tenant: str) -> set[str]:
        """Ids of a tenant's requests that wait or are worked on. Raises PublishFailed without NATS."""
        try:
            return await unfinished_of(self.client, tenant)
        except (nats.errors.Error, APIError, TimeoutError) as error:
            raise PublishFailed(f"the queues do not answer: {error}") from error

    async def _count(self, stream: StreamSpec, subject_filter: str) -> int:
        """Messages on matching subjects: what waits while no worker of the model ever came."""
        try:
            info = await self.js.stream_info(stream.name, subjects_filter=subject_filter)
        except (nats.errors.Error, APIError, TimeoutError) as error:
            raise PublishFailed(f"{stream.name} does not answer: {error}") from error
        return sum((info.state.subjects or {}).values())


def _complete(ended: Ended, epoch: int, completion_tokens: int) -> Ended:
    """Fill in what only the log knows."""
    usage = msgspec.structs.replace(ended.usage, completion_tokens=completion_tokens)
    return msgspec.structs.replace(ended, epoch=epoch, usage=usage)


async def _connect(url: str, name: str, wait_s: float, link: _Link) -> Client:
    async def on_error(error: Exception) -> None:
        log.warning("nats_error", error=repr(error))

    async def on_disconnect() -> None:
        if not link.closing:
            log.warning("nats_disconnected")

    async def on_reconnect() -> None:
        link.statuses.heard_nothing_yet()
        log.info("nats_reconnected")

    async def on_close() -> None:
        link.closed.set()

    try:
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    return await nats.connect(
                        url,
                        name=f"headrace-{name}-{os.getpid()}",
                        connect_timeout=2,
                        allow_reconnect=True,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=RECONNECT_WAIT_S,
                        ping_interval=5,
                        max_outstanding_pings=2,
                        pending_size=PENDING_BYTES,
                        error_cb=on_error,
                        disconnected_cb=on_disconnect,
                        reconnected_cb=on_reconnect,
                        closed_cb=on_close,
                    )
                except nats.errors.AuthorizationError as error:
                    raise ServerUnusable("NATS refused the credentials; check HEADRACE_NATS_URL") from error
                except (OSError, nats.errors.Error):
                    await asyncio.sleep(0.25)
    except TimeoutError as error:
        raise ServerMissing(
            f"no NATS server answers at {_without_password(url)}; start one (`headrace up`, or `nats-server -js`) "
            "or set HEADRACE_NATS_URL"
        ) from error


def _check_version(client: Client) -> None:
    version = client.connected_server_version
    if (version.major, version.minor) < MIN_SERVER:
        raise ServerUnusable(f"{version} is too old: 2.11 or newer is needed")


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)


__all__ = [
    "AppendRefused",
    "Bus",
    "BusError",
    "ConnectionLost",
    "DuplicateWork",
    "LogExists",
    "MessageTooLarge",
    "PublishFailed",
    "QueueFull",
    "RequestUnknown",
    "ServerMissing",
    "ServerUnusable",
    "new_worker_id",
]
