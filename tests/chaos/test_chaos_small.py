"""A part of the chaos suite that fits into every run of the tests: one fault of each kind, each under a whole wave."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.chaos.report import Report
from loadgen.chaos.run import CHAOS, REFERENCE, Plan, chaos_run
from loadgen.chaos.stack import own_stack

MODEL = "smollm2-135m-instruct"
SCALE = {"gateway": 2, "prefill": 1, "decode": 2, "draft": 1, "kvstore": 1}
FAULTS = ("kill decode", "kill prefill in its push", "kill kvstore", "kill gateway", "kill nats", "cut client")
SEED = 4


async def run_chaos(home: Path) -> Report:
    async with (
        own_stack(home, MODEL, SCALE, (REFERENCE, CHAOS), kv_memory_gib=0.08) as stack,
        chaos_run(stack, Plan(SEED, len(FAULTS), alone=4, only=FAULTS), print) as chaos,
    ):
        await chaos.run()
        return chaos.report


@pytest.mark.timeout(900)
async def test_killing_each_process_under_load_changes_no_answer_and_leaves_nothing_behind(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    report = await run_chaos(tmp_path_factory.mktemp("chaos"))  # the path to its socket must be short
    assert report.problems() == []
    assert report.missed == []
    assert {strike.fault for strike in report.struck} >= set(FAULTS)
    assert all(strike.requests for strike in report.struck)
    assert not any(strike.lost or strike.repeated or strike.changed for strike in report.struck)
