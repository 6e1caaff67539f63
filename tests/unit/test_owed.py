"""What a worker owes the logs is bounded."""

from __future__ import annotations

from typing import cast

from shared.bus import Bus
from shared.protocol.records import Claimed
from shared.worker.owed import MAX_OWED, OwedHandBacks


def test_of_too_many_the_oldest_is_given_up() -> None:
    owed = OwedHandBacks(cast(Bus, None))
    for n in range(MAX_OWED + 1):
        owed.owe("t", f"r{n}", Claimed(1, "prefill", "prefill-0.a", at_unix_s=0.0))
    owed.owe("t", "r1", Claimed(1, "prefill", "prefill-0.a", at_unix_s=1.0))
    assert len(list(owed)) == MAX_OWED
    assert "r0" not in owed
    assert {"r1", f"r{MAX_OWED}"} <= set(owed)
