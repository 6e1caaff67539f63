"""What can go wrong when telemetry starts. Once it runs, telemetry fails in silence and drops data instead."""

from __future__ import annotations


class TelemetryError(Exception):
    """Base of this package's errors."""


class MetricsServerFailed(TelemetryError):
    """The metrics endpoint could not listen, usually because its port is in use."""
