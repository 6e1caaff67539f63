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
from shared.bus.work import ACK_WAIT_S, RENEW_S, Delivery, WorkQueue

__all__ = [
    "ACK_WAIT_S",
    "RENEW_S",
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
    "RequestLog",
    "RequestUnknown",
    "ServerMissing",
    "ServerUnusable",
    "WorkQueue",
    "new_worker_id",
]
