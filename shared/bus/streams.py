"""Creates the JetStream streams from the table in `shared.protocol.streams`, and refuses streams of another shape."""

from __future__ import annotations

from collections.abc import Mapping

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError, NotFoundError, ServerError

from shared.bus.errors import ServerUnusable
from shared.bus.upgrade import move_requests, retire_single_stream
from shared.protocol.streams import REQUESTS, STREAMS, StreamSpec
from shared.protocol.subjects import Priority


def stream_config(spec: StreamSpec) -> StreamConfig:
    return StreamConfig(
        name=spec.name,
        subjects=list(spec.subjects),
        retention=RetentionPolicy.WORK_QUEUE if spec.retention == "workqueue" else RetentionPolicy.LIMITS,
        discard=DiscardPolicy.NEW if spec.discard == "new" else DiscardPolicy.OLD,
        discard_new_per_subject=spec.discard_new_per_subject,
        max_msgs=spec.max_msgs,
        max_msgs_per_subject=spec.max_msgs_per_subject,
        max_bytes=spec.max_bytes,
        max_age=spec.max_age_s,
        storage=StorageType.FILE,
        num_replicas=1,
        duplicate_window=1,
        allow_direct=spec.allow_direct,
        republish=RePublish(src=spec.republish[0], dest=spec.republish[1]) if spec.republish else None,
    )


async def ensure_streams(js: JetStreamContext) -> None:
    """Create what is missing and update limits. Safe to call from many services at once.

    Raises ServerUnusable when a stream of that name cannot take our configuration.
    """
    earlier = await retire_single_stream(js)
    for spec in STREAMS:
        config = stream_config(spec)
        try:
            try:
                info = await js.stream_info(spec.name)
            except NotFoundError:
                await js.add_stream(config)
                continue
            if spec.adjustable:
                config = config.evolve(max_msgs=info.config.max_msgs)
            if not _same(info.config, config):
                await js.update_stream(config)
        except (BadRequestError, ServerError) as error:
            raise ServerUnusable(f"stream {spec.name} cannot be set up: {error.description}") from error
    if earlier:
        await move_requests(js)


async def limit_requests(js: JetStreamContext, limits: Mapping[Priority, int]) -> None:
    """Have the queue refuse more than so many requests of a priority. What it holds beyond that stays.

    Raises ServerUnusable.
    """
    for priority, max_msgs in limits.items():
        name = REQUESTS[priority].name
        config = (await js.stream_info(name)).config
        if config.max_msgs == max_msgs:
            continue
        try:
            await js.update_stream(config.evolve(max_msgs=max_msgs))
        except (BadRequestError, ServerError) as error:
            raise ServerUnusable(f"stream {name} does not take a limit of {max_msgs}: {error.description}") from error


def _same(present: StreamConfig, wanted: StreamConfig) -> bool:
    fields = (
        "subjects", "retention", "discard", "discard_new_per_subject", "max_msgs", "max_msgs_per_subject",
        "max_bytes", "max_age", "allow_direct", "duplicate_window",
    )  # fmt: skip
    return all(getattr(present, f) == getattr(wanted, f) for f in fields) and (
        (present.republish is None) == (wanted.republish is None)
    )
