"""What can go wrong between two peers of the KV plane."""

from __future__ import annotations


class TransportError(Exception):
    """Base of all errors of this package."""


class TransportUnavailable(TransportError):
    """The chosen transport cannot be used in this process, for example because UCX does not load."""


class AddressTaken(TransportError):
    """This process cannot listen where it was told to."""


class PeerUnreachable(TransportError):
    """No connection could be made to the peer."""


class CarrierUnusable(PeerUnreachable):
    """The peer is there, but block bytes do not reach it over the agreed carrier."""


class PeerRefused(TransportError):
    """The peers do not trust each other: the secrets differ, or the peer is full or speaks another version."""


class PeerGone(TransportError):
    """The connection broke, or was given up, in the middle of an exchange. It is closed and no buffer is in use."""


class ProtocolViolation(TransportError):
    """The peer sent something that it may not send. The connection is closed."""


class UnusableBuffer(TransportError):
    """A buffer is not contiguous, is read-only where it must be written, or lies where the transport cannot reach."""
