"""How the work queues stand: what waits, how much has been pulled and has left, and whose it is. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from shared.protocol.streams import JOBS, REQUESTS, StreamSpec
from shared.protocol.subjects import Priority, decode_token, tenant_filters

LIST_S: Final = 5.0

log = structlog.get_logger(__name__)

RequestKey = tuple[str, str]
"""Tenant and request id."""


@dataclass(frozen=True)
class QueueReading:
    """A work queue at one moment.

    `waiting`, `pulled`: of one model, the requests of each priority that no worker has, and all deliveries so far,
    repeated ones too. `held`, `left`, `limit`: of the whole stream, its messages, those that were acked or withdrawn so
    far, and the most that it takes; -1 is no limit.
    """

    waiting: Mapping[Priority, int]
    pulled: int
    held: int
    left: int
    limit: int


@dataclass(frozen=True)
class QueueReadings:
    """The queue of requests, a stream for each priority, and the queue of jobs."""

    requests: Mapping[Priority, QueueReading]
    jobs: QueueReading


async def read_queue(
    js: JetStreamContext, stream: StreamSpec, consumers: Mapping[Priority, tuple[str, str]]
) -> QueueReading:
    """`consumers`: a model's durable consumers in the stream, each with its filter. Raises what NATS raises."""
    info = await js.stream_info(stream.name)
    parts = await asyncio.gather(*(_read_part(js, stream, *consumer) for consumer in consumers.values()))
    return QueueReading(
        waiting={priority: waiting for priority, (waiting, _) in zip(consumers, parts, strict=True)},
        pulled=sum(pulled for _, pulled in parts),
        held=info.state.messages,
        left=info.state.last_seq - info.state.messages,
        limit=-1 if info.config.max_msgs is None else info.config.max_msgs,
    )


async def _read_part(js: JetStreamContext, stream: StreamSpec, durable: str, subjects: str) -> tuple[int, int]:
    """What waits for a consumer, and its deliveries."""
    try:
        consumer = await js.consumer_info(stream.name, durable)
    except NotFoundError:  # no worker of the model ever came
        found = (await js.stream_info(stream.name, subjects_filter=subjects)).state.subjects or {}
        return sum(found.values()), 0
    return consumer.num_pending or 0, consumer.delivered.consumer_seq if consumer.delivered else 0


async def unfinished_of(client: Client, tenant: str) -> set[str]:
    """Ids of the tenant's requests that wait or are worked on, of all models. Raises what NATS raises."""
    requests, jobs = tenant_filters(tenant)
    places: list[tuple[StreamSpec, str]] = [(spec, requests) for spec in REQUESTS.values()]
    # In this order: work is put into the second queue before it is taken out of the first.
    found = await asyncio.gather(*(list_subjects(client, spec.name, subjects) for spec, subjects in places))
    found.append(await list_subjects(client, JOBS.name, jobs))
    return {request_id for subjects_found in found for _, request_id in request_keys(subjects_found).values()}


def request_key(subject: str) -> RequestKey:
    """The last two tokens of every request's subjects. Raises ValueError when they are no encoded names."""
    tenant, request_id = subject.split(".")[-2:]
    return decode_token(tenant), decode_token(request_id)


def request_keys(subjects: Iterable[str]) -> dict[str, RequestKey]:
    """The keys of those subjects that have one. Others were published by a stranger: they are logged and left alone."""
    keys: dict[str, RequestKey] = {}
    strange: list[str] = []
    for subject in subjects:
        try:
            keys[subject] = request_key(subject)
        except ValueError:
            strange.append(subject)
    if strange:
        log.warning("subjects_not_understood", count=len(strange), first=strange[0])
    return keys


class _Subjects(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Error(msgspec.Struct):
    code: int = 500
    err_code: int | None = None
    description: str | None = None


class _StreamPage(msgspec.Struct):
    """The part of JetStream's answer that counts here."""

    state: _Subjects | None = None
    total: int = 0
    error: _Error | None = None


async def list_subjects(client: Client, stream: str, subjects_filter: str = ">") -> dict[str, int]:
    """Subjects of a stream and how many messages each holds. The server answers in pages, of which nats-py reads one.

    Raises what NATS raises.
    """
    subjects: dict[str, int] = {}
    while True:
        query = msgspec.json.encode({"subjects_filter": subjects_filter, "offset": len(subjects)})
        reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", query, timeout=LIST_S)
        page = msgspec.json.decode(reply.data, type=_StreamPage)
        if page.error is not None:
            raise APIError(page.error.code, page.error.description, page.error.err_code)
        found = page.state.subjects if page.state is not None else None
        if not found:
            return subjects
        subjects |= found
        if len(subjects) >= page.total:
            return subjects
