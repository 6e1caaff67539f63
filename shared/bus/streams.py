"""Creates the JetStream streams from the table in `shared.protocol.streams`, and refuses streams of another shape."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError, NotFoundError, ServerError

from shared.bus.errors import ServerUnusable
from shared.protocol.streams import STREAMS, StreamSpec


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
    for spec in STREAMS:
        config = stream_config(spec)
        try:
            try:
                info = await js.stream_info(spec.name)
            except NotFoundError:
                await js.add_stream(config)
                continue
            if not _same(info.config, config):
                await js.update_stream(config)
        except (BadRequestError, ServerError) as error:
            raise ServerUnusable(f"stream {spec.name} cannot be set up: {error.description}") from error


def _same(present: StreamConfig, wanted: StreamConfig) -> bool:
    fields = (
        "subjects", "retention", "discard", "discard_new_per_subject", "max_msgs", "max_msgs_per_subject",
        "max_bytes", "max_age", "allow_direct", "duplicate_window",
    )  # fmt: skip
    return all(getattr(present, f) == getattr(wanted, f) for f in fields) and (
        (present.republish is None) == (wanted.republish is None)
    )
