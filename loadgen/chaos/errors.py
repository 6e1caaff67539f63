"""What keeps a chaos run from starting or ends it. A broken promise is a line of the report, not an exception."""

from __future__ import annotations

from loadgen.errors import LoadgenError


class ChaosError(LoadgenError):
    """Base of this package's errors."""


class StackUnusable(ChaosError):
    """The stack does not start, does not answer, or does not come back after a fault."""


class FaultUnavailable(ChaosError):
    """A fault cannot be made on this stack."""


class ReferenceFailed(ChaosError):
    """The undisturbed run did not answer every request, so that there is nothing to compare with."""


class NoSuchFault(ChaosError):
    """A schedule was asked for faults that do not exist or cannot be made on this stack."""
