"""What can go wrong between a service and NATS."""

from __future__ import annotations


class BusError(Exception):
    """Base of all errors of the bus."""


class ServerMissing(BusError):
    """No NATS server answers at the given address."""


class ServerUnusable(BusError):
    """The server answers but is too old, or has no JetStream, or holds streams of another shape."""


class QueueFull(BusError):
    """The stream refused a message because a limit is reached: the system (or this subject) has enough work."""


class DuplicateWork(BusError):
    """The work queue already holds a message for this request."""


class MessageTooLarge(BusError):
    """The message is larger than the server's max_payload; trying again is of no use."""


class ConnectionLost(BusError):
    """The client closed its connection for good; nothing will be sent or received any more."""


class PublishFailed(BusError):
    """The server did not confirm a message in time. It may or may not be stored."""


class LogExists(BusError):
    """A log with this request id exists already: the request was accepted before."""


class AppendRefused(BusError):
    """Another writer was first. The caller holds the request no longer: it must drop it and never ack its message."""


class RequestUnknown(BusError):
    """No log with this id, or it is older than the retention."""
