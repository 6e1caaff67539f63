"""How much prefilled work may wait for decode before prefill stops pulling. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shared.protocol.status import InstanceStatus

LEAST_WAITING = 4
"""Enough that decode never starves between two looks at its queue, also while none of its workers is known."""


def most_jobs_waiting(setting: int, decode_workers: Iterable[InstanceStatus]) -> int:
    """The number of waiting jobs at which to stop: `setting`, or where that is 0 a quarter of decode's ready slots.

    A job that waits has shown its client a first token already, so its wait is a gap between tokens: with a quarter of
    the slots it is about a quarter of the time that a request stays in the batch, however slow decode is.
    """
    if setting:
        return setting
    slots = sum(worker.slots for worker in decode_workers if worker.state == "ready")
    return max(LEAST_WAITING, slots // 4)
