"""What ends a comparison. Ids that differ do not: they are its result."""

from __future__ import annotations

from loadgen.errors import LoadgenError


class NotMeasured(LoadgenError):
    """A request failed, or was interrupted so that its times mean nothing."""
