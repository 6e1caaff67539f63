"""What keeps a load run from starting or ends it. A request that fails is a figure of the report, not an exception."""

from __future__ import annotations


class LoadgenError(Exception):
    """Base of this package's errors; the message is one line for the user."""


class BadSpec(LoadgenError):
    """A distribution or another option cannot be understood."""


class TraceUnreadable(LoadgenError):
    """A trace file is missing or has a line of another format."""


class ServerUnusable(LoadgenError):
    """The server does not answer, or serves no model."""


class MalformedStream(LoadgenError):
    """The server sent something that is not an event stream."""
