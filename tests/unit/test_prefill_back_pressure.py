"""How much prefilled work may wait for decode: as much as decode's slots say, or as the operator says."""

from __future__ import annotations

from typing import Literal

import pytest

from services.prefill.back_pressure import LEAST_WAITING, most_jobs_waiting
from shared.protocol.status import InstanceStatus


def decode(slots: int, state: Literal["starting", "ready", "draining"] = "ready") -> InstanceStatus:
    return InstanceStatus("decode", "decode-0", "decode-0.a", 1, "h", 0, 0, state=state, slots=slots)


@pytest.mark.parametrize(
    ("workers", "most"),
    [
        ([], LEAST_WAITING),
        ([decode(1)], LEAST_WAITING),
        ([decode(16)], 4),
        ([decode(16), decode(64)], 20),
        ([decode(64), decode(640, "draining"), decode(640, "starting")], 16),
    ],
)
def test_by_default_a_quarter_of_the_ready_slots_may_wait(workers: list[InstanceStatus], most: int) -> None:
    assert most_jobs_waiting(0, workers) == most


@pytest.mark.parametrize("workers", [[], [decode(640)]])
def test_an_explicit_number_is_taken_as_it_is(workers: list[InstanceStatus]) -> None:
    assert most_jobs_waiting(1, workers) == 1
    assert most_jobs_waiting(99, workers) == 99
