"""NATS as Headrace uses it: connect, pull work, append to and follow request logs, announce and see statuses."""

from shared.bus.bus import Bus, new_worker_id
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
from shared.bus.log import LogEntry, LogState, RequestLog
from shared.bus.queues import QueueReading, QueueReadings, RequestKey, list_subjects, request_key, request_keys
from shared.bus.work import ACK_WAIT_S, RENEW_S, WEIGHTS, Delivery, WorkQueue

__all__ = [
    "ACK_WAIT_S",
    "RENEW_S",
    "WEIGHTS",
    "AppendRefused",
    "Bus",
    "BusError",
    "ConnectionLost",
    "Delivery",
    "DuplicateWork",
    "LogEntry",
    "LogExists",
    "LogReader",
    "LogState",
    "MessageTooLarge",
    "PublishFailed",
    "QueueFull",
    "QueueReading",
    "QueueReadings",
    "RequestKey",
    "RequestLog",
    "RequestUnknown",
    "ServerMissing",
    "ServerUnusable",
    "WorkQueue",
    "list_subjects",
    "new_worker_id",
    "request_key",
    "request_keys",
]
