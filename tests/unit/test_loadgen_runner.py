"""What the clients of a closed loop do when they are refused; they meet no server."""

from __future__ import annotations

import time

import pytest

from loadgen.lengths import Lengths
from loadgen.outcome import Outcome
from loadgen.plan import RequestSpec, SyntheticPlanner, TokenCost
from loadgen.runner import run_closed

PLANNER = SyntheticPlanner(1, Lengths("8", 8, 8), Lengths("8", 8, 8), TokenCost(0, 1.0), 0, "test")


class Refusing:
    """Refuses the first request, and watches itself."""

    def __init__(self, retry_after: str) -> None:
        self.retry_after = retry_after
        self.sent_s: list[float] = []

    async def send(self, spec: RequestSpec, origin_s: float, intended_s: float) -> Outcome:
        self.sent_s.append(time.perf_counter())
        outcome = Outcome(len(self.sent_s), 8, 8, intended_s)
        if len(self.sent_s) == 1:
            outcome.error, outcome.retry_after = "http_503", self.retry_after
        return outcome

    def began(self) -> None:
        pass

    def ended(self, outcome: Outcome) -> None:
        pass


@pytest.mark.parametrize(
    ("retry_after", "waits"), [("1", True), ("0", False), ("Wed, 21 Oct 2026 07:28:00 GMT", False), ("-5", False)]
)
async def test_a_client_that_was_refused_comes_again_when_it_was_told_to(retry_after: str, waits: bool) -> None:
    server = Refusing(retry_after)
    outcomes = await run_closed(server, PLANNER, server, concurrency=1, limit=3)
    assert [outcome.refused for outcome in outcomes] == [True, False, False]
    first, second, _ = server.sent_s
    assert (second - first >= 1) == waits
